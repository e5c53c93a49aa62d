"""`megakernel export`: a trained model as a folder that `transformers` loads."""

import argparse
from pathlib import Path

from launch.arguments import add_run_arguments
from launch.messages import printable
from megakernel.config import UserError

HELP = "write a run's model as a Hugging Face checkpoint"
EXAMPLE = "megakernel export runs/demo --to models/demo"
NEEDS = ("transformers",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_run_arguments(parser)
    parser.add_argument("--to", "--out", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write only the updates of a run with `optimizer.trained: lora`, as a PEFT adapter for the model that it "
        "began with (default: merge them into the model)",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="dtype of the weights (default: that of training)",
    )

    parser.add_argument(
        "--push",
        metavar="REPO",
        help="then upload the folder to OWNER/NAME of the Hugging Face hub, private if it is new",
    )
    parser.add_argument("--public", action="store_true", help="a new repository of --push is public")


def run(args: argparse.Namespace) -> int:
    """Write the export, print a summary of it, and publish it if that is asked for."""
    if args.public and args.push is None:
        raise UserError("--public has no effect alone; add --push OWNER/NAME")
    from megakernel.checkpoint.hub import Push

    push = None if args.push is None else Push.checked(args.push, args.public)
    _export(args)
    if push is not None:
        print(printable(f"{args.to} is at {push.upload(args.to)}"))
    return 0


def _export(args: argparse.Namespace) -> None:
    from megakernel.checkpoint.export import export
    from megakernel.checkpoint.trained_run import student_run

    folder = student_run(args.run_folder)
    if args.adapter:
        from megakernel.checkpoint.adapter import export_adapter

        settings = export_adapter(folder, args.to, step=args.step, dtype=args.dtype)
        base = settings["base_model_name_or_path"] or "the model that the run began with"
        print(printable(f"{args.to}: adapter of rank {settings['r']} for {base}, with its tokenizer"))
        return
    config = export(folder, args.to, step=args.step, dtype=args.dtype)
    if folder != args.run_folder:
        print(printable(f"{folder}: the student of the up-training {args.run_folder}"))
    print(printable(f"{args.to}: {config['architectures'][0]} in {config['dtype']}, with its tokenizer"))
    if "auto_map" in config:
        from megakernel.checkpoint.dense.own import imported_mechanisms

        needed = "torch and transformers, but not Megakernel"
        if mechanisms := imported_mechanisms(config):
            needed = f"Megakernel installed, which alone has {', '.join(mechanisms)}"
        print(
            f"load it with AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True); it needs {needed}"
        )

"""`megakernel export`: a trained model as a folder that `transformers` loads."""

import argparse
from pathlib import Path

from launch.arguments import add_run_arguments
from launch.messages import printable

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


def run(args: argparse.Namespace) -> int:
    """Write the export and print a summary of it."""
    from megakernel.checkpoint.export import export
    from megakernel.checkpoint.trained_run import student_run

    folder = student_run(args.run_folder)
    if args.adapter:
        from megakernel.checkpoint.adapter import export_adapter

        settings = export_adapter(folder, args.to, step=args.step, dtype=args.dtype)
        base = settings["base_model_name_or_path"] or "the model that the run began with"
        print(printable(f"{args.to}: adapter of rank {settings['r']} for {base}, with its tokenizer"))
        return 0
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
    return 0

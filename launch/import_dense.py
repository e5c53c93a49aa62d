"""`megakernel import`: what a dense checkpoint is, as the model section of a run that starts from it."""

import argparse
import sys
from pathlib import Path

from megakernel.config import UserError
from megakernel.config.errors import written_to

HELP = "read a Hugging Face checkpoint and write the configuration of a model that starts from it"
EXAMPLE = "megakernel import models/Llama-3.2-1B --to configs/model/llama-1b.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="HF_DIR", help="folder with config.json and safetensors"
    )
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FILE",
        help="a new file for the YAML (default: print it on the console)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing, and print how far from transformers the hidden states are behind each layer",
    )


def run(args: argparse.Namespace) -> int:
    """Check that every tensor is there in its shape and none is unknown, and logits; give the model section."""
    if args.to is not None and args.to.exists():
        raise UserError(f"--to {args.to} exists already; name a new file, or remove it")
    if args.check and args.to is not None:
        raise UserError(f"--to {args.to} would not be written: --check compares alone; leave one of them out")
    import torch

    from megakernel.checkpoint.dense import DenseCheckpoint
    from megakernel.checkpoint.dense.checkpoint import fragment
    from megakernel.checkpoint.parity import Parity, layer_distances, of_folder
    from megakernel.model.parameters import parameter_count
    from megakernel.training.run_folder import write_whole

    checkpoint = DenseCheckpoint(args.checkpoint)
    if args.check:
        found = layer_distances(checkpoint, str(args.checkpoint), torch.device("cpu"))
        width = max(map(len, found))
        print(f"{'behind':{width}}  largest difference / largest number, float32")
        for place, distance in found.items():
            print(f"{place:{width}}  {distance:.1e}")
        Parity(found["logits"]).check(str(args.checkpoint))
        return 0
    model = checkpoint.model
    assert model.vocab_size is not None
    plain = model.model_copy(update={"vocab_multiple": 1})  # padding is the run's, not the checkpoint's
    count = parameter_count(plain, model.vocab_size, model.max_positions or 0)
    text = fragment(checkpoint)
    compared = of_folder(checkpoint, str(args.checkpoint), torch.device("cpu"))
    compared.check(str(args.checkpoint))
    if args.to is None:
        print(text, end="")
        print(f"{args.checkpoint}: {compared}", file=sys.stderr)
        return 0
    with written_to("--to", args.to):
        args.to.parent.mkdir(parents=True, exist_ok=True)
        write_whole(args.to, text)
    print(f"{args.checkpoint}: {checkpoint.config['model_type']}, {count:,} parameters, all tensors there")
    print(f"{args.checkpoint}: {compared}")
    print(f"{args.to}: lay a run on it with `extends: {args.to.name}`")
    return 0

"""`megakernel import`: the model section of a run that starts from a dense checkpoint."""

import argparse
import sys
from pathlib import Path

from launch.messages import printable
from megakernel.config import UserError
from megakernel.config.errors import check_writable, report_write_errors

HELP = "read a Hugging Face checkpoint and write the configuration of a model that starts from it"
EXAMPLE = "megakernel import models/Llama-3.2-1B --to configs/model/llama-1b.yaml"
NEEDS = ("transformers",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "checkpoint",
        metavar="HF_DIR",
        help="folder with config.json and safetensors, or hf:NAME[@REVISION], fetched into the cache of the hub",
    )
    parser.add_argument(
        "--to",
        "--out",
        type=Path,
        metavar="FILE",
        help="new file for the YAML (default: print it)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; print how far the hidden states after each layer are from those of transformers",
    )


def run(args: argparse.Namespace) -> int:
    """Check the names and shapes of all tensors, and the logits; write the model section."""
    if args.to is not None and args.to.exists():
        raise UserError(f"--to {args.to} exists already; name a new file, or remove it")
    if args.check and args.to is not None:
        raise UserError(f"--to {args.to} would not be written: --check only compares; leave one of them out")
    if args.to is not None:
        check_writable("--to", args.to)  # comparing logits may take long
    import torch

    from megakernel.checkpoint.dense import DenseCheckpoint
    from megakernel.checkpoint.dense.checkpoint import config_fragment
    from megakernel.checkpoint.dense.families import unread_dropout
    from megakernel.checkpoint.hub import local_folder
    from megakernel.checkpoint.parity import Parity, folder_parity, layer_distances
    from megakernel.model.parameters import parameter_count
    from megakernel.training.run_folder import write_atomically

    folder = local_folder(args.checkpoint)
    checkpoint = DenseCheckpoint(folder)
    if args.check:
        distances = layer_distances(checkpoint, str(folder), torch.device("cpu"))
        width = max(map(len, distances))
        print(f"{'after':{width}}  largest difference / largest number, float32")
        for layer, distance in distances.items():
            print(f"{layer:{width}}  {distance:.1e}")
        Parity(distances["logits"]).check(args.checkpoint)
        return 0
    model = checkpoint.model
    assert model.vocab_size is not None
    unpadded = model.model_copy(update={"vocab_multiple": 1})  # the checkpoint has no vocabulary padding
    if dropout := unread_dropout(checkpoint.config):
        print(printable(f"{args.checkpoint}: {dropout}"), file=sys.stderr)
    count = parameter_count(unpadded, model.vocab_size, model.max_positions or 0)
    text = config_fragment(checkpoint)
    parity = folder_parity(checkpoint, str(folder), torch.device("cpu"))
    parity.check(args.checkpoint)
    if args.to is None:
        print(text, end="")
        print(printable(f"{args.checkpoint}: {parity}"), file=sys.stderr)
        return 0
    with report_write_errors("--to", args.to):
        write_atomically(args.to, text)
    name, to = printable(args.checkpoint), printable(str(args.to))
    print(f"{name}: {checkpoint.config['model_type']}, {count:,} parameters, all tensors present")
    print(f"{name}: {parity}")
    print(f"{to}: base a run on it with `extends: {printable(args.to.name)}`")
    return 0

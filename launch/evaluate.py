"""`megakernel evaluate`: how well a trained model predicts its validation text."""

import argparse

from launch.run_arguments import add_run_arguments

HELP = "measure loss, perplexity and bits per byte of a run on its validation data, by position"
EXAMPLE = "megakernel evaluate runs/demo --samples 256 --seq-len 2048"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_run_arguments(parser)
    parser.add_argument(
        "--samples", type=int, metavar="N", help="validation samples (default: those of the run)"
    )
    parser.add_argument(
        "--seq-len", type=int, metavar="L", help="tokens per sample (default: that of the run)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Evaluate one checkpoint and print the result."""
    from megakernel.evaluation import evaluate_run

    return evaluate_run(
        args.run_folder, step=args.step, samples=args.samples, seq_len=args.seq_len, as_json=args.json
    )

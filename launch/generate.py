"""`megakernel generate`: text from a trained model."""

import argparse

from launch.run_arguments import add_run_arguments

HELP = "continue a prompt with a trained model"
EXAMPLE = "megakernel generate runs/demo --prompt 'def main' --max-new-tokens 200"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_run_arguments(parser)
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="text to continue; '' begins a new document"
    )
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the likeliest (default %(default)s)",
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (default: from all)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest with this share (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation, token by token."""
    from megakernel.generation import Sampling, generate_text
    from megakernel.training.trained_run import student

    text = generate_text(
        student(args.run_folder),
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        sampling=Sampling(args.temperature, args.top_k, args.top_p),
        seed=args.seed,
        step=args.step,
    )
    print(args.prompt, end="", flush=True)
    for piece in text:
        print(piece, end="", flush=True)
    print()
    return 0

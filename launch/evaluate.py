"""`megakernel evaluate`: how well a trained model predicts its validation text."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.run_arguments import add_run_arguments

if TYPE_CHECKING:
    from megakernel.evaluation import Evaluation

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
    parser.add_argument(
        "--draws",
        type=int,
        metavar="D",
        help="average probabilities over D draws of the noise that training redraws",
    )
    parser.add_argument(
        "--baseline",
        metavar="NAME",
        help="measure nystromformer, bigbird, longformer or reformer of `transformers` in place of an encoder run",
    )
    parser.add_argument(
        "--baseline-weights", type=Path, metavar="DIR", help="its weights (default: drawn from run.seed)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Evaluate one checkpoint and print the result."""
    from rich.console import Console
    from rich.progress import Progress

    from megakernel.config import UserError
    from megakernel.evaluation import evaluate_baseline, evaluate_run

    if args.baseline is not None and args.draws is not None:
        raise UserError(f"--draws {args.draws} votes over a run's own noise; leave out --draws or --baseline")

    stderr = Console(stderr=True)
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("evaluating", total=None)
        how: dict[str, Any] = {
            "samples": args.samples,
            "seq_len": args.seq_len,
            "progress": lambda done, total: bar.update(task, completed=done, total=total),
        }
        if args.baseline is None:
            result = evaluate_run(args.run_folder, step=args.step, draws=args.draws, **how)
        else:
            result = evaluate_baseline(args.run_folder, args.baseline, weights=args.baseline_weights, **how)
    if args.json:
        print(json.dumps(result.as_dict(), indent=1))
    else:
        _print_table(result)
    return 0


def _print_table(result: "Evaluation") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("position", "predictions", "loss", "perplexity", caption_justify="left", caption_style="")
    for column in table.columns:
        column.justify = "right"
    for bucket in result.by_position:
        span = f"{bucket.first}-{bucket.last}"
        table.add_row(span, f"{bucket.tokens:,}", f"{bucket.loss:.4f}", f"{bucket.perplexity:.2f}")
    table.add_section()
    table.add_row("all", f"{result.tokens:,}", f"{result.loss:.4f}", f"{result.perplexity:.2f}", style="bold")
    console = Console(highlight=False)
    console.print(f"{result.run} at step {result.step}: {result.samples} samples of {result.seq_len} tokens")
    if result.draws is not None:
        console.print(f"probabilities are means over {result.draws} draws of the layers' noise")
    console.print(table)
    if result.bits_per_byte is not None:
        console.print(f"{result.bits_per_byte:.4f} bits/byte", style="bold")
    if result.accuracy is not None:
        console.print(f"accuracy {result.accuracy:.1%}", style="bold")

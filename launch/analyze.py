"""`megakernel analyze`: the papers' tables and figures about the attention of a trained model."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from launch.arguments import Number, add_run_arguments
from launch.messages import console
from megakernel.analysis.plots.catalogue import ALL, ANALYSES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from megakernel.analysis.plots.run import Result

HELP = "write tables and plots about a checkpoint's attention: spectra, ranks, spans, gates, noise"
EXAMPLE = "megakernel analyze runs/demo --what attention span gates\n\nanalyses:\n" + "\n".join(
    f"  {name:<17} {analysis.shows}{f' ({analysis.source})' if analysis.source else ''}"
    for name, analysis in ANALYSES.items()
)
NEEDS = ("matplotlib",)

MAX_GROUPS = 24
"""Most rows of a printed summary; with more groups, rows are grouped by the first column only."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add_run_arguments(parser)
    add(
        "--what",
        nargs="+",
        required=True,
        metavar="NAME",
        help=f"analyses to run, or {ALL}: those that apply to the run's attention",
    )
    add("--samples", type=int, default=8, metavar="N", help="validation samples (default %(default)s)")
    add("--seq-len", type=int, metavar="L", help="tokens per sample (default: that of the run, at most 512)")
    add(
        "--draws",
        type=Number(int, maximum=1_000_000),
        default=100,
        metavar="D",
        help="noise draws (default %(default)s)",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="output folder (default: RUN/analysis/step_N, and the plots also in TensorBoard)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the analyses one after another and print a summary of each."""
    from megakernel.analysis.plots.run import analyze_run

    out = console(highlight=False)
    with console(stderr=True).status("loading") as status:
        results = analyze_run(
            args.run_folder,
            args.what,
            step=args.step,
            samples=args.samples,
            seq_len=args.seq_len,
            draws=args.draws,
            out=args.out,
            begin=lambda analysis: status.update(analysis.name),
        )
        for result in results:
            _print(result, out)
    return 0


def _print(result: "Result", out: "Console") -> None:
    if result.analysis.value:
        out.print(_summary(result))
    plots = len(result.plots)
    out.print(f"{result.table}, {plots} plot{'s' * (plots != 1)}", soft_wrap=True)


def _summary(result: "Result") -> "Table":
    from rich.table import Table

    from megakernel.analysis.plots.table import summaries

    value, by = result.analysis.value, result.analysis.by
    groups = summaries(result.rows, value, by)
    if len(groups) > MAX_GROUPS:
        by = by[:1]
        groups = summaries(result.rows, value, by)
    table = Table(*by, f"{value}, min", "mean", "max")
    for group in groups:
        table.add_row(*map(str, group.group), *(f"{x:.4g}" for x in group[1:]))
    return table

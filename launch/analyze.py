"""`megakernel analyze`: the papers' tables and figures about the attention of a trained model."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from launch.arguments import Number, add_run_arguments
from launch.messages import console
from megakernel.analysis.plots.catalogue import ALL, ANALYSES
from megakernel.config import UserError

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
        "--at-accuracy",
        type=Number(float, 0, 1),
        nargs="+",
        metavar="A",
        help="instead of --step: for each A the first kept checkpoint with this validation accuracy, from 0 to 1",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="output folder, with --at-accuracy of a folder step_N for each checkpoint (default: RUN/analysis/step_N, "
        "and the plots also in TensorBoard)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the analyses of one checkpoint after another and print a summary of each."""
    out = console(highlight=False)
    if args.at_accuracy is None:
        _analyze(args, args.step, args.out, out)
        return 0
    from megakernel.analysis.plots.run import steps_at_accuracy

    if args.step is not None:
        raise UserError(
            f"--step {args.step} is one checkpoint and --at-accuracy chooses them; leave out one of them"
        )
    steps = steps_at_accuracy(args.run_folder, args.at_accuracy)
    for step in dict.fromkeys(steps.values()):
        levels = ", ".join(f"{level:g}" for level, chosen in steps.items() if chosen == step)
        out.print(f"accuracy {levels}: step {step}")
        _analyze(args, step, None if args.out is None else args.out / f"step_{step}", out)
    return 0


def _analyze(args: argparse.Namespace, step: int | None, target: Path | None, out: "Console") -> None:
    from megakernel.analysis.plots.run import analyze_run

    with console(stderr=True).status("loading") as status:
        results = analyze_run(
            args.run_folder,
            args.what,
            step=step,
            samples=args.samples,
            seq_len=args.seq_len,
            draws=args.draws,
            out=target,
            begin=lambda analysis: status.update(analysis.name),
        )
        for result in results:
            _print(result, out)


def _print(result: "Result", out: "Console") -> None:
    for value in filter(None, (result.analysis.value, *result.analysis.also)):
        out.print(_summary(result, value))
    plots = len(result.plots)
    out.print(f"{result.table}, {plots} plot{'s' * (plots != 1)}", soft_wrap=True)


def _summary(result: "Result", value: str) -> "Table":
    from rich.table import Table

    from megakernel.analysis.plots.table import summaries

    by = result.analysis.by
    groups = summaries(result.rows, value, by)
    if len(groups) > MAX_GROUPS:
        by = by[:1]
        groups = summaries(result.rows, value, by)
    table = Table(*by, f"{value}, min", "mean", "max")
    for group in groups:
        table.add_row(*map(str, group.group), *(f"{x:.4g}" for x in group[1:]))
    return table

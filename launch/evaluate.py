"""`megakernel evaluate`: how well a trained model predicts its validation text, and what it finds in a long context."""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launch.arguments import Number, add_model_arguments
from launch.messages import console

if TYPE_CHECKING:
    from megakernel.evaluation import Result

HELP = "measure a run: loss, perplexity and bits per byte on its validation data by position, and tasks of long context"
EXAMPLE = "megakernel evaluate runs/demo --task lm --task passkey:length=1024+4096"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_model_arguments(parser)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="prepared folder whose text is read (default: that of the run; a model folder has none)",
    )
    parser.add_argument(
        "--task",
        action="append",
        metavar="NAME[:key=value,...]",
        help="lm (the default), passkey, needle, mqar, copy, induction, variables, common_words or frequent_words with "
        "options (docs/evaluation.md); may be given several times",
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="validation samples (default: those of the run), and examples of each length",
    )
    parser.add_argument(
        "--seq-len", type=int, metavar="L", help="tokens per sample (default: that of the run)"
    )
    parser.add_argument(
        "--draws",
        type=Number(int, most=1_000_000),
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
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of tables: an object, with --task a list"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate one checkpoint, print what was measured, and keep it in the run's folder."""
    from megakernel.config import UserError

    own = {"--draws": args.draws, "--data": args.data, "--task": args.task and args.task[0]}
    for option, value in own.items():
        if args.baseline is not None and value is not None:
            raise UserError(f"{option} {value} is of a run's own model; leave out {option} or --baseline")
    found = []
    for result in _results(args):
        if args.json:
            found.append(result.as_dict())
        else:
            _print(result)
    if args.json:
        print(json.dumps(found if args.task else found[0], indent=1))
    return 0


def _results(args: argparse.Namespace) -> "Iterator[Result]":
    """The results, under a bar on stderr, on a terminal alone; those of a run's own model are kept in its folder."""
    from rich.progress import Progress

    from megakernel.checkpoint.opened import find
    from megakernel.evaluation import evaluate_baseline, evaluate_tasks, record

    stderr = console(stderr=True)
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        line = bar.add_task("evaluating", total=None)

        def show(spec: str, done: int, total: int) -> None:
            bar.update(line, description=spec, completed=done, total=total)

        how = {"samples": args.samples, "seq_len": args.seq_len}
        if args.baseline is not None:
            how |= {"weights": args.baseline_weights, "progress": partial(show, "evaluating")}
            yield evaluate_baseline(args.run_folder, args.baseline, **how)
            return
        # Chosen once, so that a run which saves meanwhile does not change it.
        run = find(args.run_folder, args.step).run
        how |= {"step": None if run is None else run.checkpoint.step, "draws": args.draws, "data": args.data}
        for spec, result in evaluate_tasks(args.run_folder, args.task or ["lm"], progress=show, **how):
            yield result
            if run is not None:
                record(args.run_folder, run.checkpoint.step, spec, result, run.config.logging.tensorboard)


def _print(result: "Result") -> None:
    from rich.table import Table

    shown = result.table()
    table = Table(*shown.columns, caption_justify="left", caption_style="")
    for column in table.columns:
        column.justify = "right"
    for row in shown.rows:
        table.add_row(*row)
    if shown.total is not None:
        table.add_section()
        table.add_row(*shown.total, style="bold")
    out = console(highlight=False)
    out.print(shown.title, soft_wrap=True)
    out.print(table)
    for line in shown.below:
        out.print(line, style="bold")

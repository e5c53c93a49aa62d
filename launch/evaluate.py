"""`megakernel evaluate`: a model's loss on validation text, its scores on long-context tasks and in the harness."""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launch.arguments import Number, add_model_arguments
from launch.messages import console

if TYPE_CHECKING:
    from megakernel.evaluation import TaskResult

HELP = "evaluate a run: loss, perplexity and bits per byte by position on validation data, and long-context tasks"
EXAMPLE = "megakernel evaluate runs/demo --task lm --task passkey:length=1024+4096"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add_model_arguments(parser)
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="prepared folder to read text from (default: the run's; a model folder has none); nothing is recorded",
    )
    add(
        "--task",
        action="append",
        metavar="NAME[:key=value,...]",
        help="lm (the default), translation, passkey, needle, mqar, copy, induction, variables, common_words or "
        "frequent_words with options, or lm_eval:NAME of lm-evaluation-harness (docs/evaluation.md); may be given "
        "several times",
    )
    add(
        "--include-path",
        type=Path,
        metavar="DIR",
        help="folder with YAML files of further tasks for lm_eval:NAME",
    )
    add(
        "--samples",
        type=int,
        metavar="N",
        help="validation samples (default: the run's), and examples of each length",
    )
    add("--seq-len", type=int, metavar="L", help="tokens per sample (default: the run's)")
    add(
        "--draws",
        type=Number(int, maximum=1_000_000),
        metavar="D",
        help="average probabilities over D draws of the noise that training draws anew",
    )
    add(
        "--baseline",
        metavar="NAME",
        help="measure nystromformer, bigbird, longformer or reformer of `transformers` instead of an encoder run",
    )
    add("--baseline-weights", type=Path, metavar="DIR", help="its weights (default: drawn from run.seed)")
    add("--json", action="store_true", help="print JSON instead of tables: an object, with --task a list")


def run(args: argparse.Namespace) -> int:
    """Evaluate one checkpoint, print the results, and record those on the run's own data in its folder."""
    from megakernel.config import UserError

    if args.baseline_weights is not None and args.baseline is None:
        raise UserError(
            f"--baseline-weights {args.baseline_weights} has no effect alone; add --baseline NAME"
        )
    not_for_baselines = {"--step": args.step, "--draws": args.draws, "--data": args.data}
    not_for_baselines["--include-path"] = args.include_path
    not_for_baselines["--task"] = args.task and args.task[0]
    for option, value in not_for_baselines.items():
        if args.baseline is not None and value is not None:
            raise UserError(f"{option} {value} is for a run's own model; leave out {option} or --baseline")
    records = []
    try:
        for result in _results(args):
            if args.json:
                records.append(result.as_dict())
            else:
                _print(result)
    finally:
        if records:  # also if the last one cannot be recorded in the run's folder
            print(json.dumps(records if args.task else records[0], indent=1))
    return 0


def _results(args: argparse.Namespace) -> "Iterator[TaskResult]":
    """Yield results, with a progress bar if stderr is a terminal; record those of a run's own model and data."""
    from rich.progress import Progress

    from megakernel.checkpoint.opened import find_model
    from megakernel.evaluation import evaluate_tasks, not_drawn, record, send
    from megakernel.generation import continue_texts, translate_sources

    stderr = console(stderr=True)

    def note(line: str) -> None:
        stderr.print(line, soft_wrap=True)

    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("evaluating", total=None)

        def show(spec: str, done: int, total: int) -> None:
            bar.update(task, description=spec, completed=done, total=total)

        options = {"samples": args.samples, "seq_len": args.seq_len}
        if args.baseline is not None:
            from megakernel.papers.baselines import evaluate_baseline

            options |= {"weights": args.baseline_weights, "progress": partial(show, "evaluating")}
            yield evaluate_baseline(args.run_folder, args.baseline, **options)
            return
        # The checkpoint is chosen once: a live run may save a newer one meanwhile.
        run = find_model(args.run_folder, args.step).run
        step = None if run is None else run.checkpoint.step
        options |= {"step": step, "draws": args.draws, "data": args.data}
        options |= {"include_path": args.include_path, "continue_texts": continue_texts}
        options |= {"translate": translate_sources}
        records: list[Path] = []
        try:
            for spec, result in evaluate_tasks(
                args.run_folder, args.task or ["lm"], progress=show, **options
            ):
                yield result
                if run is not None and args.data is None:
                    in_tensorboard = run.config.logging.tensorboard
                    records += [record(args.run_folder, run.checkpoint.step, spec, result, in_tensorboard)]
                    if line := not_drawn(result):
                        note(line)
        finally:
            if run is not None and records:
                send(run.config, args.run_folder, run.checkpoint.step, records, note)


def _print(result: "TaskResult") -> None:
    from rich.table import Table

    content = result.table()
    table = Table(*content.columns, caption_justify="left", caption_style="")
    for column in table.columns:
        column.justify = "right"
    for row in content.rows:
        table.add_row(*row)
    if content.total is not None:
        table.add_section()
        table.add_row(*content.total, style="bold")
    out = console(highlight=False)
    out.print(content.title, soft_wrap=True)
    out.print(table)
    for line in content.below:
        out.print(line, style="bold", soft_wrap=True)

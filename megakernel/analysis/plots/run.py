"""Analyze a run folder: cheap checks come before the import of torch."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megakernel.checkpoint.manifest import step_of
from megakernel.config import UserError
from megakernel.config.errors import report_write_errors
from megakernel.evaluation.language_modelling import check_length, evaluated_config
from megakernel.evaluation.subject import find_run, load_run
from megakernel.training.observing.event_files import add_png, replaced_events
from megakernel.training.observing.metrics_writer import read_metrics
from megakernel.training.run_folder import events_folder, write_atomically

from .catalogue import ALL, Analysis, select_analyses
from .table import Row, to_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DEFAULT_LENGTH = 512
"""Default tokens of a sequence, unless those of training are shorter; matrices have as many rows."""

LONGEST = 4096
"""Maximum tokens of a sequence: its matrix in float64 takes 134 MB."""


@dataclass(frozen=True)
class Result:
    """The rows of one analysis, and the files that hold them."""

    analysis: Analysis
    rows: Sequence[Row]
    table: Path
    plots: Sequence[Path]


def analyze_run(
    folder: Path,
    names: Sequence[str],
    *,
    step: int | None = None,
    samples: int = 8,
    seq_len: int | None = None,
    draws: int = 100,
    out: Path | None = None,
    begin: Callable[[Analysis], None] = lambda analysis: None,
) -> Iterator[Result]:
    """Analyze a checkpoint on its run's validation data, in this process and in float32.

    Args:
        folder: folder of the run, an up-training's stage included.
        names: of `catalogue.ANALYSES`, or `all`, which skips analyses that do not apply or have no rows.
        step: of the checkpoint; None takes the newest good one.
        samples: number of validation samples.
        seq_len: tokens of each; None takes those of training, at most DEFAULT_LENGTH.
        draws: number of draws of noise, for analyses of its effects.
        out: folder of tables and plots; None takes RUN/analysis/step_N, and also adds the plots to the run's
            TensorBoard (as its run NAME/analysis), as `plots/NAME/PLOT` at the checkpoint's step.
        begin: called before each analysis.

    Yields each result after its files are written; they replace those of an earlier analysis of the checkpoint.

    Raises:
        UserError: no run, no such checkpoint, no corpus, invalid names or values, or a model that has diverged.
    """
    source = find_run(folder, step, ["validation"])
    config, at = source.config, source.step
    analyses = select_analyses(names, config, str(folder))
    if draws < 2:
        raise UserError(f"draws={draws} have no deviation; give --draws 2 or more")
    length = min(DEFAULT_LENGTH, config.training.evaluation_len) if seq_len is None else seq_len
    if length > LONGEST:
        raise UserError(f"seq_len={length} makes matrices of {length} rows; give --seq-len {LONGEST} or less")
    data_config = evaluated_config(config, samples, length)
    training = data_config.training.model_copy(update={"micro_batch_size": 1})
    data_config = data_config.model_copy(update={"training": training})
    check_length(data_config, source.text)
    target = folder / "analysis" / f"step_{at}" if out is None else out
    in_tensorboard = out is None and config.logging.tensorboard
    with report_write_errors("--out", target):
        target.mkdir(parents=True, exist_ok=True)
    import torch

    from data_pipeline.loader import ValidationBatches
    from data_pipeline.order import Share
    from megakernel.model import cast

    from .drawing import figures
    from .subject import Subject

    model_source = load_run(source)
    batches = list(ValidationBatches(data_config, source.text, Share()))
    model = cast(model_source.model, torch.float32)
    name = f"the checkpoint of step {at} of {folder}"
    subject = Subject(config, model, batches, model_source.device, length, draws, name)
    for _ in subject.captured(samples=1):
        pass  # refuses a model that has diverged also for analyses of something else
    for analysis in analyses:
        begin(analysis)
        rows = analysis.measure(subject)
        if not rows and ALL in names:
            continue
        if not rows:
            raise UserError(
                f"--what {analysis.name}: sequences of {length} tokens show nothing of it; give a larger --seq-len"
            )
        table = target / f"{analysis.name}.csv"
        write_atomically(table, to_csv(rows))
        plots = {
            name: _save(figure, target / f"{analysis.name}_{name}.png")
            for name, figure in figures(rows, analysis.plots).items()
        }
        if in_tensorboard:
            tagged = {f"plots/{analysis.name}/{name}": path for name, path in plots.items()}
            add_to_tensorboard(events_folder(folder, "analysis"), tagged, at, analysis.name)
        yield Result(analysis, rows, table, list(plots.values()))


def steps_at_accuracy(folder: Path, levels: Sequence[float]) -> dict[float, int]:
    """Level -> step of the first kept checkpoint whose validation accuracy is at least that.

    levels: shares of right predictions, 0 to 1. Raises UserError if no kept checkpoint has one.
    """
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder} has no metrics.jsonl with accuracies; give the checkpoint with --step")
    accuracies = {
        line["step"]: line["eval/accuracy"]
        for line in read_metrics(folder)
        if line.get("eval/accuracy") is not None
    }
    kept = {
        step: accuracies[step]
        for path in (folder / "checkpoints").glob("step_*")
        if (step := step_of(path)) is not None and step in accuracies
    }
    if not kept:
        raise UserError(
            f"--at-accuracy {levels[0]}: {folder} has no checkpoint of a step that was evaluated, which takes a "
            "classifier and a checkpoint.keep_every that training.eval_every divides; give the checkpoint with --step"
        )
    steps = {}
    for level in levels:
        reached = [step for step, accuracy in kept.items() if accuracy >= level]
        if not reached:
            best = max(kept, key=lambda step: kept[step])
            raise UserError(
                f"--at-accuracy {level}: no kept checkpoint of {folder} has it; the best is {kept[best]:.4f} at step "
                f"{best}, so give at most that"
            )
        steps[level] = min(reached)
    return steps


def _save(figure: "Figure", path: Path) -> Path:
    staged = path.with_suffix(".partial")
    figure.savefig(staged, dpi=100, format="png")
    os.replace(staged, path)
    return path


def add_to_tensorboard(tensorboard: Path, plots: Mapping[str, Path], step: int, name: str) -> None:
    """Write PNG files by tag to event files at a step, replacing those that `name` has written for it before."""
    with replaced_events(tensorboard, f".analysis.{name}.step_{step}") as writer:
        for tag, path in plots.items():
            add_png(writer, tag, path.read_bytes(), step)

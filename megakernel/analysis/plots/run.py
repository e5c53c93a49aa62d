"""From a run folder to tables and plots: what is cheap to check comes before the libraries are loaded."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megakernel.config import UserError
from megakernel.config.errors import written_to
from megakernel.evaluation.language_modelling import check_length, evaluated_config
from megakernel.evaluation.subject import find, opened
from megakernel.training.observing.event_files import add_png, replaced_events
from megakernel.training.run_folder import write_whole

from .catalogue import ALL, Analysis, chosen
from .table import Row, to_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ROW = 512
"""Tokens of a row, where nothing else is asked for and training has no shorter ones: matrices have as many rows."""

LONGEST = 4096
"""Tokens of a sequence at most: a matrix of so many takes 134 MB."""


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
        names: of `catalogue.ANALYSES`, or `all`, which passes over what shows nothing.
        step: which checkpoint; None takes the newest good one.
        samples: validation samples.
        seq_len: tokens of each; None takes those of training, ROW at most.
        draws: of noise, for the analyses of what it does.
        out: where tables and plots go; None takes RUN/analysis/step_N, and puts the plots into the run's
            TensorBoard, too (RUN/tensorboard/analysis), under `analysis/NAME/PLOT` at the checkpoint's step.
        begin: called before each analysis.

    Yields each result once its files are written; what an earlier analysis of the checkpoint left is replaced.

    Raises:
        UserError: no run, no such checkpoint, no corpus, or values and names that do not fit them.
    """
    source = find(folder, step, reads_text=True)
    config, at = source.config, source.step
    analyses = chosen(names, config, str(folder))
    if draws < 2:
        raise UserError(f"draws={draws} have no deviation; give --draws 2 or more")
    length = min(ROW, config.training.evaluation_len) if seq_len is None else seq_len
    if length > LONGEST:
        raise UserError(f"seq_len={length} makes matrices of {length} rows; give --seq-len {LONGEST} or less")
    read = evaluated_config(config, samples, length)
    one_row = read.training.model_copy(update={"micro_batch_size": 1})
    read = read.model_copy(update={"training": one_row})
    check_length(read, source.text)
    target = folder / "analysis" / f"step_{at}" if out is None else out
    shows = out is None and config.logging.tensorboard
    with written_to("--out", target):
        target.mkdir(parents=True, exist_ok=True)
    import torch

    from data_pipeline.loader import ValidationBatches
    from data_pipeline.order import Share
    from megakernel.model import cast

    from .drawing import figures
    from .subject import Subject

    found = opened(source)
    batches = list(ValidationBatches(read, source.text, Share()))
    model = cast(found.model, torch.float32)
    subject = Subject(config, model, batches, found.device, length, draws)
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
        write_whole(table, to_csv(rows))
        plots = {
            name: _save(figure, target / f"{analysis.name}_{name}.png")
            for name, figure in figures(rows, analysis.plots).items()
        }
        if shows:
            tagged = {f"analysis/{analysis.name}/{name}": path for name, path in plots.items()}
            show(folder / "tensorboard" / "analysis", tagged, at, analysis.name)
        yield Result(analysis, rows, table, list(plots.values()))


def _save(figure: "Figure", path: Path) -> Path:
    staged = path.with_suffix(".partial")
    figure.savefig(staged, dpi=100, format="png")
    os.replace(staged, path)
    return path


def show(tensorboard: Path, plots: Mapping[str, Path], step: int, name: str) -> None:
    """Put PNG files into a folder of event files at a step, by tag, in place of what `name` has shown there before."""
    with replaced_events(tensorboard, f".analysis.{name}.step_{step}") as writer:
        for tag, path in plots.items():
            add_png(writer, tag, path.read_bytes(), step)

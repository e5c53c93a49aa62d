"""The metrics of a run on disk: metrics.jsonl and TensorBoard, one curve over all restarts."""

import json
import math
import textwrap
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megakernel.config import Config, to_yaml

from .event_files import PATTERN, drop_later_steps
from .histograms import Histogram

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from tensorboard.compat.proto.summary_pb2 import Summary


COMPARED = (
    "train/loss",
    "eval/loss",
    "eval/bits_per_byte",
    "eval/accuracy",
    "throughput/tokens_per_sec",
    "throughput/mfu",
    "memory/peak_gib",
)
"""Columns of the HPARAMS page, each with the last value of the run; a run without one leaves it empty."""

LAYOUT = {
    "Learning": {
        "loss": ["Multiline", ["^train/loss$", "^eval/loss$"]],
        "bits per byte": ["Multiline", ["^train/bits_per_byte$", "^eval/bits_per_byte$"]],
        "gradient norm": ["Multiline", ["^train/grad_norm$"]],
        "learning rate": ["Multiline", ["^train/lr$"]],
    },
    "Speed": {
        "tokens per second": ["Multiline", ["^throughput/tokens_per_sec$"]],
        "share of peak FLOP/s": ["Multiline", ["^throughput/mfu$"]],
        "seconds of a step, and of its data": [
            "Multiline",
            ["^throughput/step_time$", "^throughput/data_time$"],
        ],
        "peak memory, GiB": ["Multiline", ["^memory/.*peak_gib$"]],
    },
    "Health": {
        "slowest rank over the median": ["Multiline", ["^health/straggle$"]],
        "slowest rank": ["Multiline", ["^health/slowest_rank$"]],
        "share of a step spent on data": ["Multiline", ["^health/data_share$"]],
        "steps skipped so far": ["Multiline", ["^train/skipped_steps$"]],
    },
}
"""Pages of CUSTOM SCALARS: page -> chart -> tags, as regular expressions."""


def logged(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl: `step` and scalars by tag, None of one that was not finite."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _hparams(config: Config) -> "tuple[Summary, Summary, Summary]":
    """Summaries for TensorBoard: the compared metrics, this run's values, and its success."""
    from torch.utils.tensorboard.summary import hparams

    return hparams(dict(_flat(config.model_dump(mode="json"))), dict.fromkeys(COMPARED))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    """Dotted key -> leaf; what is no scalar is written as text."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, (str, int, float)) else json.dumps(value)


@dataclass
class Entry:
    """The metrics of one step, by TensorBoard tag."""

    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    figures: "dict[str, Figure]" = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """Markdown."""


class MetricsWriter:
    """Writes what is known of steps, counted from 1, under their TensorBoard tags. For rank 0 alone.

    metrics_file: one JSON object per step with scalars; non-finite numbers are null there.
    tensorboard: folder of event files, or None.
    done_steps: the step of the checkpoint that the run continues from. What an earlier process wrote about
    later steps, of any kind, is removed from both; with 0, all it wrote.
    """

    def __init__(self, metrics_file: Path, tensorboard: Path | None, done_steps: int):
        self._file, self._tensorboard = metrics_file, tensorboard
        last_kept = done_steps or -1
        _keep_steps(metrics_file, last_kept)
        self._lines = metrics_file.open("a", encoding="utf-8")
        self._events = None
        self._described = False
        if tensorboard is not None:
            # Imported here because it takes seconds that the other ranks need not wait.
            from torch.utils.tensorboard import SummaryWriter

            drop_later_steps(tensorboard, last_kept)
            self._described = any(tensorboard.glob(PATTERN))
            # A TensorBoard that was open all the while has read what is gone now: the mark of a restart tells it.
            self._events = SummaryWriter(str(tensorboard), purge_step=last_kept + 1)

    def __enter__(self) -> "MetricsWriter":
        self._hook = threading.excepthook
        threading.excepthook = self._thread_ended
        return self

    def _thread_ended(self, ended: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread, and raises what that met again where the next entry is written."""
        if not isinstance(ended.exc_value, OSError):
            self._hook(ended)

    def __exit__(self, kind: object, *error: object) -> None:
        with suppress(OSError) if kind is not None else nullcontext():
            self._lines.close()
            if self._events is not None:
                self._events.close()
        threading.excepthook = self._hook

    def describe(self, config: Config, packing: str = "") -> None:
        """Tell TensorBoard of the configuration and of pages to open with, once in the life of the run.

        packing: what is to be said of it, in Markdown.
        """
        if self._events is None or self._described:
            return
        experiment, start, _ = _hparams(config)
        with _named(self._tensorboard):
            # SummaryWriter.add_hparams would open a run of its own in a subfolder, and call it finished at once.
            for summary in (experiment, start):
                self._events.file_writer.add_summary(summary, 0)
            self._events.add_custom_scalars(LAYOUT)
            # Markdown shows an indented text as it is.
            self._events.add_text("config", textwrap.indent(to_yaml(config), "    "), 0)
            if packing:
                self._events.add_text("packing", packing, 0)
            self._events.flush()

    def finish(self, config: Config) -> None:
        """Tell TensorBoard that the run has come to its last step."""
        if self._events is not None:
            with _named(self._tensorboard):
                self._events.file_writer.add_summary(_hparams(config)[2], config.training.steps)

    def write(self, step: int, entry: Entry) -> None:
        """Write what is known of one step, all in one call; once it returns, a kill loses nothing.

        Raises OSError, which names the file.
        """
        with _named(self._file):
            if entry.scalars:
                finite = {
                    tag: value if math.isfinite(value) else None for tag, value in entry.scalars.items()
                }
                self._lines.write(json.dumps({"step": step, **finite}) + "\n")
                self._lines.flush()
        with _named(self._tensorboard):
            self._add_events(step, entry)

    def _add_events(self, step: int, entry: Entry) -> None:
        if self._events is None:
            return
        for tag, value in entry.scalars.items():
            self._events.add_scalar(tag, value, step)
        for tag, histogram in entry.histograms.items():
            if histogram.counts:
                moments = histogram.low, histogram.high, histogram.count, histogram.total, histogram.squares
                self._events.add_histogram_raw(tag, *moments, *histogram.limits_and_counts(), step)
        for tag, figure in entry.figures.items():
            self._events.add_figure(tag, figure, step)
        for tag, text in entry.texts.items():
            self._events.add_text(tag, text, step)
        self._events.flush()


@contextmanager
def _named(place: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(place)) from None


def _keep_steps(metrics_file: Path, last_kept: int) -> None:
    """Drop the lines of later steps, and a last line that a kill cut short."""
    if not metrics_file.exists():
        return
    kept = metrics_file.with_name(metrics_file.name + ".partial")
    with metrics_file.open(encoding="utf-8") as old, kept.open("w", encoding="utf-8") as new:
        new.writelines(line for line in old if _step(line) <= last_kept)
    kept.replace(metrics_file)


def _step(line: str) -> float:
    if not line.endswith("\n"):
        return math.inf
    return json.loads(line)["step"]

"""Writes a run's metrics to metrics.jsonl, TensorBoard and experiment trackers, as one curve over all restarts."""

import json
import math
import textwrap
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megakernel.config import Config, to_yaml
from megakernel.config.section import Section
from megakernel.training.run_folder import EVENT_FILES

from .event_files import drop_later_steps
from .histograms import Histogram

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from tensorboard.compat.proto.summary_pb2 import Summary


HPARAM_METRICS = (
    "train/loss",
    "eval/loss",
    "eval/bits_per_byte",
    "eval/accuracy",
    "throughput/tokens_per_sec",
    "throughput/mfu",
    "memory/peak_gib",
)
"""Metrics on TensorBoard's HPARAMS page, each with the last value of the run if it has one."""

HPARAMS = (
    *("run.seed", "model.num_layers", "model.hidden_size", "model.num_heads", "optimizer.lr"),
    *("training.steps", "training.seq_len", "training.global_batch_size", "training.dtype"),
)
"""Keys on TensorBoard's HPARAMS page also at their defaults."""

_UNTOLD = ("run.name", "run.root", "logging.", "checkpoint.")
"""Beginnings of keys that are not shown there."""

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
"""TensorBoard's CUSTOM SCALARS: page -> chart -> tags, as regular expressions."""


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl: `step` and scalars by tag; non-finite ones are None.

    A last line that is being written is left out. Raises ValueError for a damaged one.
    """
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _hparams(config: Config) -> "tuple[Summary, Summary, Summary]":
    """TensorBoard summaries of the experiment's metrics, the run's start with its values, and its success."""
    from torch.utils.tensorboard.summary import hparams

    return hparams(told_keys(config), dict.fromkeys(HPARAM_METRICS))


def told_keys(config: Config) -> dict[str, str | int | float | bool]:
    """The keys that tell an experiment from others, with their values: those not at their defaults, and `HPARAMS`.

    Where a run is and how closely it is watched is left out.
    """
    shown = (*HPARAMS, *_set_keys(config))
    return {
        key: value
        for key, value in flattened(config.model_dump(mode="json"))
        if any(f"{key}.".startswith(f"{one}.") for one in shown)
        and not key.startswith(_UNTOLD)
        and value != "null"
    }


def _set_keys(section: Section, prefix: str = "") -> Iterator[str]:
    """The keys that are not at their defaults, in a section and in those inside it.

    A section that is null by default is one key.
    """
    for name, key in type(section).users_keys().items():
        value = getattr(section, name)
        if isinstance(value, Section) and key.default is not None:
            yield from _set_keys(value, f"{prefix}{name}.")
        elif section.is_set(name):
            yield prefix + name


def flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    """(dotted key, leaf); leaves that are not scalars as JSON text."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, (str, int, float)) else json.dumps(value)


@dataclass
class StepMetrics:
    """The metrics of one step, by TensorBoard tag."""

    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    figures: "dict[str, Figure]" = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """Markdown."""


class Sink(Protocol):
    """What also gets a run's metrics; it never raises."""

    def write(self, step: int, entry: StepMetrics) -> None:
        """Take the metrics of one step."""

    def close(self, failed: bool) -> None:
        """Take what is left; failed: whether the run ends by an error."""


class MetricsWriter:
    """Writes metrics of steps, counted from 1, by TensorBoard tag, on rank 0 only.

    metrics_file: one JSON object per step with scalars; non-finite numbers are null.
    tensorboard: folder of event files, or None.
    done_steps: step of the checkpoint that the run resumes from; metrics that an earlier process wrote for later steps
    are removed from both. 0: all are removed.
    sink: gets the same entries, and is closed at the end of the `with` block.
    """

    def __init__(
        self, metrics_file: Path, tensorboard: Path | None, done_steps: int, sink: Sink | None = None
    ):
        self._file, self._tensorboard, self._sink = metrics_file, tensorboard, sink
        last_kept = done_steps or -1
        _drop_later_lines(metrics_file, last_kept)
        self._lines = metrics_file.open("a", encoding="utf-8")
        self._events = None
        self._described = False
        if tensorboard is not None:
            # Imported here because it takes seconds, which other ranks need not wait.
            from torch.utils.tensorboard import SummaryWriter

            drop_later_steps(tensorboard, last_kept)
            self._described = any(tensorboard.glob(EVENT_FILES))
            # A TensorBoard that was open has already read the removed steps: purge_step hides them.
            self._events = SummaryWriter(str(tensorboard), purge_step=last_kept + 1)

    def __enter__(self) -> "MetricsWriter":
        self._hook = threading.excepthook
        threading.excepthook = self._on_thread_error
        return self

    def _on_thread_error(self, failure: threading.ExceptHookArgs) -> None:
        """Ignore OSErrors of TensorBoard's writer thread: the next entry raises them again."""
        if not isinstance(failure.exc_value, OSError):
            self._hook(failure)

    def __exit__(self, kind: object, *error: object) -> None:
        if self._sink is not None:
            self._sink.close(failed=kind is not None)
        with suppress(OSError) if kind is not None else nullcontext():
            self._lines.close()
            if self._events is not None:
                self._events.close()
        threading.excepthook = self._hook

    def describe(self, config: Config, packing: str = "") -> None:
        """Write configuration and chart layout to TensorBoard, once per run; packing: Markdown about it."""
        if self._events is None or self._described:
            return
        experiment, start, _ = _hparams(config)
        with _naming_file(self._tensorboard):
            # SummaryWriter.add_hparams would create another run in a subfolder and mark it finished.
            for summary in (experiment, start):
                self._events.file_writer.add_summary(summary, 0)
            self._events.add_custom_scalars(LAYOUT)
            # Markdown shows indented text verbatim.
            self._events.add_text("config", textwrap.indent(to_yaml(config), "    "), 0)
            if packing:
                self._events.add_text("packing", packing, 0)
            self._events.flush()

    def finish(self, config: Config) -> None:
        """Mark the run as finished in TensorBoard."""
        if self._events is not None:
            with _naming_file(self._tensorboard):
                self._events.file_writer.add_summary(_hparams(config)[2], config.training.steps)

    def write(self, step: int, entry: StepMetrics) -> None:
        """Write and flush all metrics of a step. Raises OSError, which names the file."""
        with _naming_file(self._file):
            if entry.scalars:
                finite = {
                    tag: value if math.isfinite(value) else None for tag, value in entry.scalars.items()
                }
                self._lines.write(json.dumps({"step": step, **finite}) + "\n")
                self._lines.flush()
        with _naming_file(self._tensorboard):
            self._add_events(step, entry)
        if self._sink is not None:
            self._sink.write(step, entry)

    def _add_events(self, step: int, entry: StepMetrics) -> None:
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
def _naming_file(place: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(place)) from None


def _drop_later_lines(metrics_file: Path, last_kept: int) -> None:
    """Drop lines of steps after `last_kept`, and those that a crash has damaged."""
    if not metrics_file.exists():
        return
    kept = metrics_file.with_name(metrics_file.name + ".partial")
    with (
        metrics_file.open(encoding="utf-8", errors="replace") as old,
        kept.open("w", encoding="utf-8") as new,
    ):
        new.writelines(line for line in old if _step(line) <= last_kept)
    kept.replace(metrics_file)


def _step(line: str) -> float:
    if not line.endswith("\n"):
        return math.inf
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf

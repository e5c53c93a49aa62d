"""The numbers of a run on disk: metrics.jsonl and TensorBoard, one curve over all restarts."""

import json
import math
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from megakernel.config import Config, to_yaml


class MetricsWriter:
    """Writes scalars of steps, counted from 1, under their TensorBoard tags. For rank 0 alone.

    metrics_file: one JSON object per written step; non-finite numbers are null there.
    tensorboard: folder of event files, or None.
    done_steps: the step of the checkpoint that the run continues from. What an earlier process wrote about
    later steps is removed from metrics.jsonl and hidden from readers of TensorBoard; with 0, all it wrote.
    """

    def __init__(self, metrics_file: Path, tensorboard: Path | None, done_steps: int):
        last_kept = done_steps or -1
        _keep_steps(metrics_file, last_kept)
        self._lines = metrics_file.open("a", encoding="utf-8")
        self._events = None
        # Readers hide abandoned scalars only: a description that is there stays, and must not be doubled.
        self._described = tensorboard is not None and any(tensorboard.glob("events.out.*"))
        if tensorboard is not None:
            # Imported here because it takes seconds that the other ranks need not wait.
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(tensorboard), purge_step=last_kept + 1)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        if self._events is not None:
            self._events.close()

    def describe(self, config: Config, packing: str = "") -> None:
        """Put the configuration into TensorBoard, as hparams and as text, once in the life of the run.

        packing: what is to be said of it, in Markdown.
        """
        if self._events is None or self._described:
            return
        from torch.utils.tensorboard.summary import hparams

        values = dict(_flat(config.model_dump(mode="json")))
        # SummaryWriter.add_hparams would open a run of its own in a subfolder.
        for summary in hparams(values, {"eval/loss": None, "train/loss": None}):
            self._events.file_writer.add_summary(summary)
        # Markdown shows an indented text as it is.
        self._events.add_text("config", textwrap.indent(to_yaml(config), "    "), 0)
        if packing:
            self._events.add_text("packing", packing, 0)
        self._events.flush()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of one step, all in one call; once it returns, a kill loses nothing."""
        finite = {tag: value if math.isfinite(value) else None for tag, value in scalars.items()}
        self._lines.write(json.dumps({"step": step, **finite}) + "\n")
        self._lines.flush()
        if self._events is not None:
            for tag, value in scalars.items():
                self._events.add_scalar(tag, value, step)
            self._events.flush()


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


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    """Dotted key -> leaf; what is no scalar is written as text."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, (str, int, float)) else json.dumps(value)

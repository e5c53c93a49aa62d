"""Runs side by side: keys that differ, losses at equal tokens and at equal time, evaluations."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from megakernel.checkpoint.manifest import step_of
from megakernel.checkpoint.trained_run import recorded_config, tokenizer_folder
from megakernel.config import Config, UserError
from megakernel.training.observing.metrics_writer import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSSES = ("train/loss", "eval/loss")
BITS = "eval/bits_per_byte"
"""Compared instead of losses per token if tokenizers differ."""

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Points at which losses are compared, as shares of the shortest run."""

WINDOW = 0.1
"""Share of the shortest run: a training loss at a point is the mean of those logged so shortly before it."""


@dataclass(frozen=True)
class Point:
    """A logged value of a run."""

    tokens: int
    """Tokens read before it."""

    seconds: float
    """Time of the training steps before it, without evaluation and saving."""

    value: float


@dataclass(frozen=True)
class ComparedRun:
    """What a run's folder says of it."""

    folder: Path
    config: Config

    step: int
    """Last logged step; 0 without any."""

    tokens: int
    seconds: float
    """Up to it."""

    curves: Mapping[str, Sequence[Point]]
    """Tag of `LOSSES` and `BITS` -> its values, in order."""

    evaluations: Mapping[str, tuple[int, Mapping[str, float]]]
    """Task of `megakernel evaluate` -> step of its newest result, and the result's scalars."""

    tokenizer: str | None
    """Hash of the tokenizer's files; None if the folder has none yet."""

    @classmethod
    def read(cls, folder: Path) -> "ComparedRun":
        """Read a run's folder, also while it trains. Raises UserError if its files are missing or damaged."""
        if not (folder / "config.yaml").is_file():
            raise UserError(f"{folder} has no config.yaml: the run has not started yet; leave it out")
        config = recorded_config(folder)
        try:
            lines = read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
            steps, times = zip(*_times(lines))
            values = [(line["step"], tag, line.get(tag)) for line in lines for tag in (*LOSSES, BITS)]
            at = np.interp([step for step, _, _ in values], steps, times)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{folder}/metrics.jsonl is damaged ({error}); leave the run out") from None
        curves: dict[str, list[Point]] = {}
        for (step, tag, value), seconds in zip(values, at.tolist()):
            if value is not None:
                curves.setdefault(tag, []).append(Point(_tokens(config, step), seconds, value))
        return cls(
            folder=folder,
            config=config,
            step=steps[-1],
            tokens=_tokens(config, steps[-1]),
            seconds=times[-1],
            curves=curves,
            evaluations=_evaluations(folder),
            tokenizer=_digest(tokenizer_folder(folder)),
        )

    def at(self, tag: str, axis: str, place: float, window: float) -> float | None:
        """The value of a curve at `place` on an axis, `tokens` or `seconds`; None before its first and after its last.

        Of the training loss, which varies from batch to batch, the mean of what was logged in the `window` before;
        else between the neighbours.
        """
        points = self.curves.get(tag, [])
        along: list[float] = [getattr(point, axis) for point in points]
        if tag.startswith("train/"):
            recent = [point.value for point, x in zip(points, along) if place - window < x <= place]
            if recent:
                return fmean(recent)
        if not along or not along[0] <= place <= along[-1]:
            return None
        return float(np.interp(place, along, [point.value for point in points]))


@dataclass(frozen=True)
class RunComparison:
    """Several runs, the first of which the others are compared with."""

    runs: Sequence[ComparedRun]

    @property
    def differing(self) -> list[tuple[str, list[Any]]]:
        """Every key that not all runs have the same value of, and the values; names and folders of runs are left out.

        A section that not all runs have is one key.
        """
        trees = [run.config.model_dump(mode="json", by_alias=True) for run in self.runs]
        return [item for item in _differing(trees) if item[0] not in ("run.name", "run.root")]

    @property
    def has_one_tokenizer(self) -> bool:
        """Whether losses per token compare."""
        return len({run.tokenizer for run in self.runs if run.tokenizer is not None}) < 2

    @property
    def tags(self) -> list[str]:
        """Curves to compare: losses per token, or bits per byte if tokenizers differ."""
        tags = LOSSES if self.has_one_tokenizer else (BITS,)
        return [tag for tag in tags if any(tag in run.curves for run in self.runs)]

    def at_equal(self, axis: str) -> list[tuple[float, list[dict[str, float | None]]]]:
        """Places on an axis, `tokens` or `seconds`, that all runs have reached, and each run's values there by tag.

        Empty if a run has logged nothing yet.
        """
        shortest = min(getattr(run, axis) for run in self.runs)
        window = WINDOW * shortest
        return [
            (place, [{tag: run.at(tag, axis, place, window) for tag in self.tags} for run in self.runs])
            for place in (share * shortest for share in SHARES if shortest)
        ]

    @property
    def evaluations(self) -> dict[str, list[tuple[int, Mapping[str, float]] | None]]:
        """Task -> each run's newest step and result; None for a run that was not evaluated on it."""
        tasks = dict.fromkeys(chain.from_iterable(run.evaluations for run in self.runs))
        return {task: [run.evaluations.get(task) for run in self.runs] for task in tasks}

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON; lists have one entry for each run."""
        return {
            "runs": [
                {"run": str(run.folder), "step": run.step, "tokens": run.tokens, "seconds": run.seconds}
                for run in self.runs
            ],
            "one_tokenizer": self.has_one_tokenizer,
            "keys": dict(self.differing),
            **{
                f"at_equal_{axis}": [{axis: place, "runs": values} for place, values in self.at_equal(axis)]
                for axis in ("tokens", "seconds")
            },
            "evaluations": {
                task: [None if one is None else {"step": one[0], **one[1]} for one in results]
                for task, results in self.evaluations.items()
            },
        }

    def figure(self, names: Sequence[str]) -> "Figure":
        """The curves over tokens and over time: training losses thin, evaluations with dots."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.0, 3.6), layout="constrained")
        units = "nats per token" if self.has_one_tokenizer else "bits per byte"
        for axes, (axis, unit) in zip(figure.subplots(1, 2), (("tokens", "tokens"), ("seconds", "s"))):
            for number, (run, name) in enumerate(zip(self.runs, names)):
                for tag in self.tags:
                    points, label = run.curves.get(tag, []), f"{name}, {tag.partition('/')[0]}"
                    style = {"alpha": 0.5} if tag.startswith("train/") else {"marker": "."}
                    along = [getattr(point, axis) for point in points]
                    color = f"C{number % 10}"
                    axes.plot(
                        along,
                        [point.value for point in points],
                        label=label,
                        linewidth=1,
                        color=color,
                        **style,
                    )
            time = "time of training steps" if axis == "seconds" else "tokens read"
            axes.set_title(f"loss over {time}", fontsize=9)
            axes.set_xlabel(unit)
            axes.set_ylabel(units)
            axes.legend(fontsize=6)
        return figure


def _tokens(config: Config, step: int) -> int:
    return config.training.consumed(step)[1] * config.model.sequences_per_sample


def _times(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, float]]:
    """(step, seconds of all steps up to it); steps between two logged ones take as long as the later one."""
    before, seconds = 0, 0.0
    yield before, seconds
    for line in lines:
        if "throughput/step_time" in line and line["step"] > before:
            seconds += (line["step"] - before) * line["throughput/step_time"]
            before = line["step"]
            yield before, seconds


def _differing(trees: Sequence[Mapping[str, Any]], prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    for key in dict.fromkeys(chain.from_iterable(trees)):
        values = [tree.get(key) for tree in trees]
        sections = [value for value in values if isinstance(value, dict)]
        if len(sections) == len(values):
            yield from _differing(sections, f"{prefix}{key}.")
        elif any(value != values[0] for value in values):
            yield prefix + key, values


def _evaluations(folder: Path) -> dict[str, tuple[int, dict[str, float]]]:
    files = ((step_of(file.parent), file) for file in (folder / "evaluation").glob("step_*/*.json"))
    newest: dict[str, tuple[int, dict[str, float]]] = {}
    for step, file in sorted((step, file) for step, file in files if step is not None):
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
            newest[str(result["task"])] = step, dict(result["scalars"])
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{file} is damaged ({error}); remove it, or evaluate again") from None
    return newest


def _digest(tokenizer: Path) -> str | None:
    files = sorted(file for file in tokenizer.rglob("*") if file.is_file())
    texts = [sha256(file.read_bytes()).hexdigest() for file in files]
    return sha256("".join(texts).encode()).hexdigest() if files else None

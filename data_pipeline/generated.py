"""Labelled examples that are made, not read: each a function of (seed, split, index) alone."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Any, ClassVar, NamedTuple, TypeVar

from data_pipeline.document import Document
from data_pipeline.processes import in_processes
from data_pipeline.sources import Source
from megakernel.config.errors import UserError, nearest_first

_CHUNK = 200
"""Examples that a process makes at a time: a second's work at most."""


@dataclass(frozen=True)
class Task(ABC):
    """A kind of example, its options, and how many there are of each split."""

    name: ClassVar[str]
    """What `--source` calls it."""

    classes: ClassVar[tuple[int, ...]]
    """All that an example can have."""

    train: int
    validation: int
    test: int

    @abstractmethod
    def example(self, draw: random.Random, index: int) -> Document:
        """Example `index` of a split, a function of what `draw` gives and of the index."""

    @abstractmethod
    def problem(self) -> str | None:
        """Which options leave nothing to draw, and the remedy; None for those that do."""


class Generated(Source):
    """The examples of a task, split by split."""

    has_splits = True

    def __init__(self, task: Task, seed: int, workers: int):
        """workers: processes that make them; what they make does not depend on their number."""
        super().__init__(task.train + task.validation + task.test)
        self.classes = task.classes
        self._task = task
        self._seed = seed
        self._workers = workers

    def describe(self) -> dict[str, Any]:
        """Name, options and seed."""
        return {"kind": self._task.name, **asdict(self._task), "seed": self._seed}

    def _read(self) -> Iterator[Document]:
        if self._workers == 1:
            return chain.from_iterable(map(made, self._shares()))
        return chain.from_iterable(in_processes(made, self._shares(), self._workers))

    def _shares(self) -> Iterator["Share"]:
        for split in ("train", "validation", "test"):
            count = getattr(self._task, split)
            for first in range(0, count, _CHUNK):
                yield Share(self._task, self._seed, split, range(first, min(first + _CHUNK, count)))


class Share(NamedTuple):
    """Consecutive examples of a split."""

    task: Task
    seed: int
    split: str
    indices: range


def made(share: Share) -> list[Document]:
    """The examples of a share."""
    task, seed, split, indices = share
    draws = ((random.Random(f"{task.name}/{seed}/{split}/{index}"), index) for index in indices)
    return [task.example(draw, index)._replace(split=split) for draw, index in draws]


Options = TypeVar("Options", bound=Task)


def task_of(kind: type[Options], text: str) -> Options:
    """The task with options `key=value,...` in place of its defaults; UserError for those that it has not."""
    types: dict[str, type[Any]] = {field.name: type(field.default) for field in fields(kind)}
    values: dict[str, Any] = {}
    for option in filter(None, text.split(",")):
        key, equals, value = option.partition("=")
        if key not in types or not equals:
            raise UserError(
                f"--source {kind.name}:{text}: {option!r} is no option; write KEY=VALUE with a key of "
                f"{nearest_first(key, types)}"
            )
        try:
            values[key] = types[key](value)
        except ValueError:
            word = "a number" if types[key] is float else "a whole number"
            raise UserError(f"--source {kind.name}:{text}: {key}={value} is not {word}") from None
    task = kind(**values)
    counts = {split: getattr(task, split) for split in ("train", "validation", "test")}
    negative = [f"{split}={count}" for split, count in counts.items() if count < (split == "train")]
    too_few = f"{negative[0]} is too few; give train=1 or more, other splits 0 or more" if negative else None
    if problem := too_few or task.problem():
        raise UserError(f"--source {kind.name}:{text}: {problem}")
    return task

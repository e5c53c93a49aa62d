"""Labelled examples that are made, not read: each a function of (seed, split, index) alone."""

import random
from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Annotated, ClassVar

from pydantic import Field

from data_pipeline.document import Document
from data_pipeline.encoding import in_processes
from data_pipeline.sources import Source
from megakernel.config.section import Section

_CHUNK = 200
"""Examples that a process makes at a time: a second's work at most."""


Count = Annotated[int, Field(ge=0, le=1_000_000_000, description="Examples of the split")]
Some = Annotated[int, Field(ge=1, le=1_000_000_000, description="Examples of the split")]


class GeneratedTask(Section):
    """A kind of example, its options, and how many there are of each split."""

    NAME: ClassVar[str]
    """What `--source` calls it."""

    CLASSES: ClassVar[tuple[int, ...]]
    """All that an example can have."""

    train: Some
    validation: Count
    test: Count

    @abstractmethod
    def example(self, draw: random.Random, index: int) -> Document:
        """Example `index` of a split, a function of what `draw` gives and of the index."""


class Generated(Source):
    """The examples of a task, split by split."""

    has_splits = True

    def __init__(self, task: GeneratedTask, seed: int, workers: int):
        """workers: processes that make them; what they make does not depend on their number."""
        description = {"kind": task.NAME, **task.model_dump(mode="json"), "seed": seed}
        super().__init__(description, task.train + task.validation + task.test)
        self.classes = task.CLASSES
        self._task = task
        self._seed = seed
        self._workers = workers

    def _read(self) -> Iterator[Document]:
        work = partial(made, self._task, self._seed)
        if self._workers == 1:
            return chain.from_iterable(map(work, self._ranges()))
        return chain.from_iterable(in_processes(work, self._ranges(), self._workers))

    def _ranges(self) -> Iterator[tuple[str, range]]:
        for split in ("train", "validation", "test"):
            count = getattr(self._task, split)
            for first in range(0, count, _CHUNK):
                yield split, range(first, min(first + _CHUNK, count))


def made(task: GeneratedTask, seed: int, part: tuple[str, range]) -> list[Document]:
    """The examples of a part of a split, which is its name and the indices of the examples."""
    split, indices = part
    draws = ((random.Random(f"{task.NAME}/{seed}/{split}/{index}"), index) for index in indices)
    return [task.example(draw, index)._replace(split=split) for draw, index in draws]

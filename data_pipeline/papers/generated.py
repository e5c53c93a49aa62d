"""Generated labeled examples, each a function of (seed, split, index)."""

import random
from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Annotated, ClassVar

from pydantic import Field

from data_pipeline.document import Document
from data_pipeline.encoding import parallel_map
from data_pipeline.sources import DocumentSource
from megakernel.config.section import Section

_CHUNK = 200
"""Examples that a worker generates at a time: at most a second of work."""


Count = Annotated[int, Field(ge=0, le=1_000_000_000, description="Examples of the split")]
PositiveCount = Annotated[int, Field(ge=1, le=1_000_000_000, description="Examples of the split")]


class GeneratedTask(Section):
    """A generated task: its options and the number of examples of each split."""

    NAME: ClassVar[str]
    """Its name for `--source`."""

    CLASSES: ClassVar[tuple[int, ...]]
    """All classes."""

    train: PositiveCount
    validation: Count
    test: Count

    @abstractmethod
    def example(self, rng: random.Random, index: int) -> Document:
        """Example `index` of a split, a function of `rng` and the index."""


class Generated(DocumentSource):
    """The examples of a task, split by split."""

    has_splits = True

    def __init__(self, task: GeneratedTask, seed: int, workers: int):
        """workers: processes that generate; the examples do not depend on their number."""
        description = {"kind": task.NAME, **task.model_dump(mode="json"), "seed": seed}
        super().__init__(description, task.train + task.validation + task.test)
        self.classes = task.CLASSES
        self._task = task
        self._seed = seed
        self._workers = workers

    def _read(self) -> Iterator[Document]:
        work = partial(generate_examples, self._task, self._seed)
        if self._workers == 1:
            return chain.from_iterable(map(work, self._chunks()))
        return chain.from_iterable(parallel_map(work, self._chunks(), self._workers))

    def _chunks(self) -> Iterator[tuple[str, range]]:
        for split in ("train", "validation", "test"):
            count = getattr(self._task, split)
            for first in range(0, count, _CHUNK):
                yield split, range(first, min(first + _CHUNK, count))


def generate_examples(task: GeneratedTask, seed: int, chunk: tuple[str, range]) -> list[Document]:
    """The examples of one chunk, which is the split's name and the examples' indices."""
    split, indices = chunk
    rngs = ((random.Random(f"{task.NAME}/{seed}/{split}/{index}"), index) for index in indices)
    return [task.example(rng, index)._replace(split=split) for rng, index in rngs]

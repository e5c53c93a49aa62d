"""A task's examples as documents that `prepare` writes."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from data_pipeline.document import Document
from data_pipeline.encoding import encode_answered
from data_pipeline.sources import Source
from data_pipeline.spec import kind_of, make, split
from data_pipeline.tokenizers import Tokenizer
from megakernel.config.errors import UserError

from . import TASKS
from .filler import Filler, Passages, sentences
from .haystack import Haystack
from .task import TRAINING, Example, SyntheticTask


class TaskSource(Source):
    """The examples of a task one after the other, without end.

    What is read before `encoded_by` has said what their length is counted in is for training a tokenizer.
    """

    endless = True

    def __init__(self, task: SyntheticTask):
        """Make nothing yet; UserError for a filler that cannot be read."""
        super().__init__({"kind": "task", "name": task.NAME, **task.model_dump(mode="json")})
        self._task = task
        self._filler = open_filler(task)

    @classmethod
    def named(cls, spec: str) -> "TaskSource":
        """The source of `--source task:SPEC`; UserError for a task or an option that does not exist."""
        option = "--source task:"
        name, texts = split(spec, option)
        return cls(make(kind_of(name, TASKS, option), name, texts, option))

    def _read(self) -> Iterator[Document]:
        for index in count():
            example = self._task.example(TRAINING, index, self._filler, counter(self._tokenizer))
            yield Document((example.text,), answers=example.answers)


def counter(tokenizer: Tokenizer | None) -> Callable[[Example], int] | None:
    """Counts the tokens of an example without the document's end; None without a tokenizer."""
    if tokenizer is None:
        return None
    return lambda example: len(encode_answered(tokenizer, example.text, example.answers).tokens)


def open_filler(task: SyntheticTask) -> Filler:
    """The filler of a task that is not evaluated on a run's documents; UserError where it cannot be read."""
    if not isinstance(task, Haystack) or task.filler == "sentences":
        return sentences
    if task.filler == "validation":
        raise UserError(
            "filler=validation are the validation documents of a run, for `megakernel evaluate`; "
            "give filler=sentences or a text file"
        )
    return Passages.of_file(Path(task.filler))

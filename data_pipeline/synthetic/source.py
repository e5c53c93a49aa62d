"""A synthetic task's examples as documents for `prepare`."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from data_pipeline.document import Document
from data_pipeline.encoding import encode_answered
from data_pipeline.sources import DocumentSource
from data_pipeline.spec import build, find_class, split_spec
from data_pipeline.tokenizers import Tokenizer
from megakernel.config.errors import UserError

from . import TASKS
from .filler import Filler, Passages, sentences
from .haystack import Haystack
from .task import TRAINING, Example, SyntheticTask


class TaskSource(DocumentSource):
    """The endless examples of a task.

    The tokenizer of `set_tokenizer` counts their length; those read before it is set are for training a tokenizer.
    """

    endless = True

    def __init__(self, task: SyntheticTask):
        """UserError for a filler that cannot be read."""
        super().__init__({"kind": "task", "name": task.NAME, **task.model_dump(mode="json")})
        self._task = task
        self._filler = open_filler(task)

    @classmethod
    def from_spec(cls, spec: str, seed: int = 0) -> "TaskSource":
        """The source of `--source task:SPEC`; seed: of its examples, unless SPEC names one.

        Raises UserError for an unknown task or option.
        """
        option = "--source task:"
        name, texts = split_spec(spec, option)
        return cls(build(find_class(name, TASKS, option), name, {"seed": str(seed), **texts}, option))

    def _read(self) -> Iterator[Document]:
        for index in count():
            example = self._task.example(TRAINING, index, self._filler, token_counter(self._tokenizer))
            yield Document((example.text,), answers=example.answers)


def token_counter(tokenizer: Tokenizer | None) -> Callable[[Example], int] | None:
    """A function that counts an example's tokens without end-of-document; None without a tokenizer."""
    if tokenizer is None:
        return None
    return lambda example: len(encode_answered(tokenizer, example.text, example.answers).tokens)


def open_filler(task: SyntheticTask) -> Filler:
    """The filler of a task, unless it is a run's documents; UserError if it cannot be read."""
    if not isinstance(task, Haystack) or task.filler == "sentences":
        return sentences
    if task.filler == "validation":
        raise UserError(
            "filler=validation are the validation documents of a run, for `megakernel evaluate`; "
            "give filler=sentences or a text file"
        )
    return Passages.of_file(Path(task.filler))

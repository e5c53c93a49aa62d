"""A trained model that is measured, and what measures it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from data_pipeline.corpus import Corpora
from megakernel.checkpoint import opened as models
from megakernel.checkpoint.opened import OpenedModel
from megakernel.checkpoint.trained_run import tokenizer_folder
from megakernel.config import Config, UserError

from .result import Table

if TYPE_CHECKING:
    from megakernel.model import LanguageModel

OnPass = Callable[[int, int], None]
"""Told after each forward pass how many are done, and of how many."""


@dataclass(frozen=True)
class OpenedRun(OpenedModel):
    """A checkpoint and what belongs to it, before its weights are read."""

    corpora: Corpora | None
    """The run's data; None where no task reads it."""

    @property
    def text(self) -> Corpora:
        """The run's data, which a task with `reads_text` has."""
        assert self.corpora is not None
        return self.corpora


@dataclass(frozen=True)
class Subject(OpenedRun):
    """A checkpoint's model, ready to be measured."""

    model: "LanguageModel"
    """Whole, in evaluation mode, on `device`."""

    device: torch.device


class Result(Protocol):
    """The result of a task."""

    def scalars(self) -> dict[str, float]:
        """Numbers for TensorBoard, by the last part of their tags."""

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""

    def table(self) -> Table:
        """The table for a reader."""


class Task(Protocol):
    """Something that is measured of a model."""

    @property
    def spec(self) -> str:
        """As `--task` names it."""

    @property
    def reads_text(self) -> bool:
        """Whether it needs the run's data, and not its tokenizer alone."""

    def check(self, source: OpenedRun) -> None:
        """UserError for a run that this task cannot be measured of."""

    def measure(self, subject: Subject, progress: OnPass) -> Result:
        """The result; the subject has been checked."""


def find(folder: Path, step: int | None, reads_text: bool, data: Path | None = None) -> OpenedRun:
    """The checkpoint at a step, or the newest good one, or a folder in the Hugging Face form.

    data: a prepared folder in place of the run's. Raises UserError: no model, no such checkpoint, and with reads_text
    no corpus, or one of another tokenizer.
    """
    source = models.find(folder, step, data=data)
    if reads_text and source.run is None and data is None:
        raise UserError(f"{folder} is no run and names no data; give --data DIR of `megakernel prepare`")
    corpora = Corpora(source.config.data) if reads_text else None
    if corpora is not None and source.tokenizer.hash != corpora.tokenizer_hash:
        kept = folder if source.run is None else tokenizer_folder(folder)
        raise UserError(
            f"data.train={corpora.tokenizer_folder.parent} has another tokenizer now than {folder} was trained with; "
            f"prepare the corpus with --tokenizer {kept}"
        )
    return OpenedRun(**vars(source), corpora=corpora)


def opened(source: OpenedRun) -> Subject:
    """The source with its model, in this process."""
    model, device = source.load()
    return Subject(**vars(source), model=model, device=device)


def check_positions(config: Config, seq_len: int, key: str) -> None:
    """UserError for sequences longer than learned positions; key: what set the length."""
    rows = config.model.max_positions or config.training.seq_len
    if config.model.position == "learned" and seq_len > rows:
        raise UserError(f"{key}={seq_len} exceeds the model's {rows} learned positions; give at most {rows}")


def sequences_per_pass(config: Config, seq_len: int) -> int:
    """As many tokens in a forward pass as in training, so that longer sequences need no more memory."""
    training = config.training
    return max(1, training.micro_batch_size * training.seq_len // seq_len)

"""A trained model that is measured, and what measures it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from data_pipeline import tokenizers
from data_pipeline.corpus import Corpora
from data_pipeline.tokenizers import Tokenizer
from megakernel.checkpoint.trained_run import TrainedRun, tokenizer_folder
from megakernel.config import Config, UserError
from megakernel.parallel.device import choose_device

from .result import Table

if TYPE_CHECKING:
    from megakernel.model import LanguageModel

OnPass = Callable[[int, int], None]
"""Told after each forward pass how many are done, and of how many."""


@dataclass(frozen=True)
class OpenedRun:
    """A checkpoint and what belongs to it, before its weights are read."""

    folder: Path
    """Of the run."""

    run: TrainedRun
    tokenizer: Tokenizer

    corpora: Corpora | None
    """The run's data; None where no task reads it."""

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return self.run.config

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


def find(folder: Path, step: int | None, reads_text: bool) -> OpenedRun:
    """The checkpoint at a step, or the newest good one.

    Raises UserError: no run, no such checkpoint, and with reads_text no corpus, or one of another tokenizer.
    """
    run = TrainedRun.find(folder, step)
    corpora = Corpora(run.config.data) if reads_text else None
    tokenizer = tokenizers.load(tokenizer_folder(folder), add_bos=run.config.data.add_bos)
    if corpora is not None and tokenizer.hash != corpora.tokenizer_hash:
        raise UserError(
            f"data.train={corpora.tokenizer_folder.parent} has another tokenizer now than {folder} was trained with; "
            f"prepare the corpus with --tokenizer {tokenizer_folder(folder)}"
        )
    return OpenedRun(folder, run, tokenizer, corpora)


def opened(source: OpenedRun) -> Subject:
    """The source with its model, in this process."""
    from megakernel.checkpoint.one_process import one_process_model

    device = choose_device("cpu" if source.config.training.device == "cpu" else "auto")
    model = one_process_model(source.run, source.tokenizer.vocab_size, device)
    return Subject(**vars(source), model=model, device=device)


def check_positions(config: Config, seq_len: int, key: str) -> None:
    """UserError for rows longer than learned positions; key: what set the length."""
    rows = config.model.max_positions or config.training.seq_len
    if config.model.position == "learned" and seq_len > rows:
        raise UserError(f"{key}={seq_len} exceeds the model's {rows} learned positions; give at most {rows}")


def rows_per_pass(config: Config, seq_len: int) -> int:
    """As many tokens in a forward pass as in training, so that longer rows need no more memory."""
    training = config.training
    return max(1, training.micro_batch_size * training.seq_len // seq_len)

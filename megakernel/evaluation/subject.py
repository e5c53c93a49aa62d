"""The model under evaluation, and the protocols of tasks and results."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from data_pipeline.corpus import Corpora
from megakernel.checkpoint import opened as models
from megakernel.checkpoint.opened import OpenedModel
from megakernel.checkpoint.trained_run import tokenizer_folder
from megakernel.config import Config, UserError
from megakernel.training.data import MARKERS

from .result import Table

if TYPE_CHECKING:
    from megakernel.model import LanguageModel

OnPass = Callable[[int, int], None]
"""Callback after each forward pass: (passes done, all passes)."""


@dataclass(frozen=True)
class OpenedRun(OpenedModel):
    """A checkpoint with its data, before its weights are loaded."""

    corpora: Corpora | None
    """The run's data; None if no task reads it."""

    @property
    def text(self) -> Corpora:
        """The run's data, for tasks with a `split`."""
        assert self.corpora is not None
        return self.corpora


@dataclass(frozen=True)
class LoadedRun(OpenedRun):
    """A checkpoint with its model loaded."""

    model: "LanguageModel"
    """Unpartitioned, in evaluation mode, on `device`."""

    device: torch.device


class ContinueTexts(Protocol):
    """What continues texts: `megakernel.generation`, which evaluation does not import, passed by the command."""

    def __call__(
        self,
        opened: OpenedModel,
        model: "LanguageModel",
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop: Sequence[str],
        sampling: Mapping[str, Any],
    ) -> Iterator[tuple[int, str]]:
        """(index of a prompt, its continuation) as each ends.

        prompts: their ids. stop: strings before which a text ends. sampling: options of `Sampling`.
        """


class TaskResult(Protocol):
    """The result of a task."""

    def scalars(self) -> dict[str, float]:
        """Last part of the TensorBoard tag -> value."""

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""

    def table(self) -> Table:
        """The table for terminal and TensorBoard."""


class Task(Protocol):
    """A measurement of a model."""

    @property
    def spec(self) -> str:
        """The spec of `--task`."""

    @property
    def split(self) -> str | None:
        """The split of the run's data that it reads; None: it needs only the tokenizer."""

    def check(self, source: OpenedRun) -> None:
        """UserError for a run that this task does not support."""

    def measure(self, subject: LoadedRun, progress: OnPass) -> TaskResult:
        """The result; the subject has passed `check`."""


def find_run(folder: Path, step: int | None, splits: Collection[str], data: Path | None = None) -> OpenedRun:
    """The checkpoint at a step, or the newest good one, or a folder in Hugging Face format.

    splits: those to read. data: a prepared folder to use instead of the run's. Raises UserError for no model or
    checkpoint, and with splits for no corpus, one without them, or one of another tokenizer.
    """
    source = models.find_model(folder, step, data=data)
    if splits and source.run is None and data is None:
        raise UserError(f"{folder} is not a run and has no data; give --data DIR of `megakernel prepare`")
    markers = [] if source.run is None else [folder / MARKERS]
    corpora = Corpora(source.config.data, validation=False, markers=markers) if splits else None
    if corpora is not None and source.tokenizer.hash != corpora.tokenizer_hash:
        trained_tokenizer = folder if source.run is None else tokenizer_folder(folder)
        raise UserError(
            f"data.train={corpora.tokenizer_folder.parent} has another tokenizer now than {folder} was trained with; "
            f"prepare the corpus with --tokenizer {trained_tokenizer}"
        )
    if corpora is not None:
        for split in splits:
            corpora.of_split(split)
    return OpenedRun(**vars(source), corpora=corpora)


def load_run(source: OpenedRun) -> LoadedRun:
    """The checkpoint with its model loaded in this process."""
    model, device = source.load()
    return LoadedRun(**vars(source), model=model, device=device)


def check_positions(config: Config, seq_len: int, key: str) -> None:
    """UserError for sequences longer than `Config.most_positions`; key: the option of the length, for errors."""
    limit = config.most_positions
    if limit is not None and seq_len > limit:
        raise UserError(
            f"{key}={seq_len} exceeds the {limit} positions that the model has weights for; give at most {limit}"
        )


def sequences_per_pass(config: Config, seq_len: int) -> int:
    """The batch size that keeps training's tokens per forward pass, so that longer sequences need no more memory."""
    training = config.training
    return max(1, training.micro_batch_size * training.seq_len // seq_len)

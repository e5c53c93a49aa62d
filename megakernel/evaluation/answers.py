"""`--task` with a synthetic task: accuracy of the answers under teacher forcing."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data_pipeline.corpus import Corpora
from data_pipeline.encoding import AnsweredTokens, encode_answered
from data_pipeline.synthetic import EVALUATION, Example, SyntheticTask
from data_pipeline.synthetic.filler import Filler, Passages
from data_pipeline.synthetic.haystack import Haystack
from data_pipeline.synthetic.source import open_filler, token_counter
from data_pipeline.token_files import TokenFile
from data_pipeline.tokenizers import Tokenizer
from megakernel.config import UserError

from .answer_counts import AnswerCounts, Cell
from .subject import LoadedRun, OnPass, OpenedRun, check_positions, sequences_per_pass

VALIDATION = "validation"
"""The filler that is the run's validation documents, and their split."""


@dataclass(frozen=True)
class AnswersTask:
    """A task of `data_pipeline.synthetic` at one or more lengths."""

    spec: str
    at_lengths: tuple[SyntheticTask, ...]
    """The task at each length."""

    samples: int
    """Examples per length, rounded up to the same number for each depth."""

    @property
    def split(self) -> str | None:
        """The validation split if its documents are the filler."""
        is_filler = any(isinstance(task, Haystack) and task.filler == VALIDATION for task in self.at_lengths)
        return VALIDATION if is_filler else None

    def check(self, source: OpenedRun) -> None:
        """UserError for an encoder, no samples, a length beyond learned positions or too short for an example, or an
        unreadable filler.
        """
        kind = source.config.model.kind
        if not source.config.model.is_causal:
            raise UserError(
                f"--task {self.spec}: model.kind={kind} of {source.folder} does not continue text; "
                "give a run of a causal_lm, or --task lm"
            )
        if self.samples < 1:
            raise UserError(
                f"--task {self.spec}: samples={self.samples} leaves nothing to evaluate; give 1 or more"
            )
        for task in self.at_lengths:
            check_positions(source.config, task.length, f"--task {self.spec}: length")
            task.example(EVALUATION, 0, _filler(task, source), token_counter(source.tokenizer))

    def measure(self, subject: LoadedRun, progress: OnPass) -> "AnswerCounts":
        """Accuracy and loss by length and depth."""
        sizes = [self._examples(task) for task in self.at_lengths]
        passes = sum(
            -(-size // sequences_per_pass(subject.config, task.length))
            for task, size in zip(self.at_lengths, sizes)
        )
        done = count(1)
        cells = [
            cell
            for task, size in zip(self.at_lengths, sizes)
            for cell in _measure(
                subject, task, _filler(task, subject), size, lambda: progress(next(done), passes)
            )
        ]
        return AnswerCounts(self.spec, str(subject.folder), subject.step, cells)

    def _examples(self, task: SyntheticTask) -> int:
        depths = getattr(task, "depths", 1)
        return -(-self.samples // depths) * depths


def _filler(task: SyntheticTask, source: OpenedRun) -> Filler:
    if isinstance(task, Haystack) and task.filler == VALIDATION:
        return Passages(_texts(source.text, source.tokenizer, 4 * task.length), VALIDATION)
    return open_filler(task)


def _texts(corpora: Corpora, tokenizer: Tokenizer, tokens: int) -> Iterator[str]:
    """The texts of the first `tokens` tokens of the validation documents."""
    for corpus in corpora.of_split(VALIDATION):
        for document in TokenFile(corpus.prefix(VALIDATION)):
            if tokens <= 0:
                return
            yield tokenizer.decode(document[:tokens].tolist())
            tokens -= len(document)


def _measure(
    subject: LoadedRun, task: SyntheticTask, filler: Filler, size: int, on_pass: Callable[[], None]
) -> list[Cell]:
    cells: dict[float | None, Cell] = {}
    sequences = sequences_per_pass(subject.config, task.length)
    for start in range(0, size, sequences):
        examples = [
            task.example(EVALUATION, index, filler, token_counter(subject.tokenizer))
            for index in range(start, min(start + sequences, size))
        ]
        for example, predictions in zip(examples, _predict(subject, examples)):
            key = None if example.depth is None else round(example.depth, 4)
            cell = cells.get(key, Cell(task.length, key))
            cells[key] = cell.with_example(*predictions)
        on_pass()
    return [cells[key] for key in sorted(cells, key=lambda depth: -1.0 if depth is None else depth)]


def _predict(subject: LoadedRun, examples: Sequence[Example]) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
    """Per example: the offsets of its answers among the answers' tokens, these tokens' losses, and which are right."""
    from .perplexity import predict

    sequences = [encode_answered(subject.tokenizer, example.text, example.answers) for example in examples]
    tokens, scored = _pad(sequences, subject.tokenizer.eod)
    positions = torch.arange(tokens.shape[1]).repeat(len(sequences), 1)
    # Each token predicts the next one. `roll` wraps around, but no example begins with an answer.
    labels, chosen = tokens.roll(-1, dims=1), scored.roll(-1, dims=1)
    inputs = (part.to(subject.device) for part in (tokens, positions, labels, chosen))
    found = predict(subject.model, subject.tokenizer.vocab_size, *inputs)
    counts = chosen.sum(1).tolist()
    for sequence, losses, right in zip(sequences, found.losses.split(counts), found.right.split(counts)):
        sizes = [end - start for start, end in sequence.answers]
        yield np.cumsum([0, *sizes[:-1]]), losses, right


def _pad(sequences: Sequence[AnsweredTokens], eod: int) -> tuple[Tensor, Tensor]:
    """Tokens (B, N) with end-of-document, which also pads them, and which of them belong to answers (B, N) bool."""
    tokens = [torch.tensor([*sequence.tokens, eod]) for sequence in sequences]
    scored = [torch.from_numpy(sequence.scored()).bool() for sequence in sequences]
    return pad_sequence(tokens, batch_first=True, padding_value=eod), pad_sequence(scored, batch_first=True)

"""How many answers of a task are right, all tokens before them given."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data_pipeline.corpus import Corpora
from data_pipeline.encoding import AnsweredTokens, encode_answered
from data_pipeline.synthetic import EVALUATION, Example
from data_pipeline.synthetic import SyntheticTask as Examples
from data_pipeline.synthetic.filler import Filler, Passages
from data_pipeline.synthetic.haystack import Haystack
from data_pipeline.synthetic.source import counter, open_filler
from data_pipeline.token_files import TokenFile
from data_pipeline.tokenizers import Tokenizer
from megakernel.config import UserError

from .answer_counts import AnswerCounts, Cell
from .subject import OnPass, OpenedRun, Subject, check_positions, sequences_per_pass

VALIDATION = "validation"
"""The filler that is the run's validation documents."""


@dataclass(frozen=True)
class AnswersTask:
    """A task of `data_pipeline.synthetic` at one length or several."""

    spec: str
    at_lengths: tuple[Examples, ...]
    """The task with each of its lengths."""

    samples: int
    """Examples of each length; as many more as give each depth the same number."""

    @property
    def reads_text(self) -> bool:
        """Where validation documents hide what is asked for."""
        return any(isinstance(task, Haystack) and task.filler == VALIDATION for task in self.at_lengths)

    def check(self, source: OpenedRun) -> None:
        """UserError for an encoder, no samples, lengths too long for learned positions or too short for an example, and
        an unreadable filler.
        """
        kind = source.config.model.kind
        if not source.config.model.is_causal:
            raise UserError(
                f"--task {self.spec}: model.kind={kind} of {source.folder} continues no text; "
                "give a run of a causal_lm, or --task lm"
            )
        if self.samples < 1:
            raise UserError(
                f"--task {self.spec}: samples={self.samples} leaves nothing to evaluate; give 1 or more"
            )
        for task in self.at_lengths:
            check_positions(source.config, task.length, f"--task {self.spec}: length")
            task.example(EVALUATION, 0, _filler(task, source), counter(source.tokenizer))

    def measure(self, subject: Subject, progress: OnPass) -> "AnswerCounts":
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

    def _examples(self, task: Examples) -> int:
        depths = getattr(task, "depths", 1)
        return -(-self.samples // depths) * depths


def _filler(task: Examples, source: OpenedRun) -> Filler:
    if isinstance(task, Haystack) and task.filler == VALIDATION:
        return Passages(_texts(source.text, source.tokenizer, 4 * task.length), VALIDATION)
    return open_filler(task)


def _texts(corpora: Corpora, tokenizer: Tokenizer, tokens: int) -> Iterator[str]:
    """The first validation documents, so many tokens or all."""
    for corpus in corpora.validation:
        for document in TokenFile(corpus.prefix("validation")):
            if tokens <= 0:
                return
            yield tokenizer.decode(document[:tokens].tolist())
            tokens -= len(document)


def _measure(
    subject: Subject, task: Examples, filler: Filler, size: int, step: Callable[[], None]
) -> list[Cell]:
    cells: dict[float | None, Cell] = {}
    sequences = sequences_per_pass(subject.config, task.length)
    for start in range(0, size, sequences):
        examples = [
            task.example(EVALUATION, index, filler, counter(subject.tokenizer))
            for index in range(start, min(start + sequences, size))
        ]
        for example, found in zip(examples, _scored(subject, examples)):
            key = None if example.depth is None else round(example.depth, 4)
            cell = cells.get(key, Cell(task.length, key))
            cells[key] = cell.plus(*found)
        step()
    return [cells[key] for key in sorted(cells, key=lambda depth: -1.0 if depth is None else depth)]


def _scored(subject: Subject, examples: Sequence[Example]) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
    """For each example the offsets of its answers among their tokens, those tokens' losses, and which are right."""
    from .perplexity import predict

    sequences = [encode_answered(subject.tokenizer, example.text, example.answers) for example in examples]
    tokens, scored = _padded(sequences, subject.tokenizer.eod)
    positions = torch.arange(tokens.shape[1]).repeat(len(sequences), 1)
    # The place before a token predicts it; an example begins with no answer.
    labels, chosen = tokens.roll(-1, dims=1), scored.roll(-1, dims=1)
    inputs = (part.to(subject.device) for part in (tokens, positions, labels, chosen))
    found = predict(subject.model, subject.tokenizer.vocab_size, *inputs)
    counts = chosen.sum(1).tolist()
    for row, losses, right in zip(sequences, found.losses.split(counts), found.right.split(counts)):
        sizes = [end - start for start, end in row.answers]
        yield np.cumsum([0, *sizes[:-1]]), losses, right


def _padded(sequences: Sequence[AnsweredTokens], eod: int) -> tuple[Tensor, Tensor]:
    """Tokens (B, N) with their end, as training reads them, filled up with ends; which belong to answers (B, N)."""
    tokens = [torch.tensor([*row.tokens, eod]) for row in sequences]
    scored = [torch.from_numpy(row.scored()).bool() for row in sequences]
    return pad_sequence(tokens, batch_first=True, padding_value=eod), pad_sequence(scored, batch_first=True)

"""Beam search of an encoder-decoder's texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.batch import PADDING
from megakernel.checkpoint.opened import OpenedModel, find_model
from megakernel.config import UserError
from megakernel.config.decoding import NEW_TOKENS, Beams

from .run import TextPiece, check_text
from .states import select_rows

if TYPE_CHECKING:
    from megakernel.model import LanguageModel


_BEAMS = Beams()

_EVALUATED = 128
"""Hypotheses in progress at once in an evaluation."""


@dataclass(frozen=True)
class Translation:
    """What a model makes of a source."""

    tokens: list[int]
    """Without the end."""

    score: float
    """See `Beams.length_penalty`."""

    is_complete: bool
    """Whether it has an end; otherwise it was cut at the most tokens."""


@dataclass(frozen=True)
class TranslatedText(TextPiece):
    """The whole translation of a prompt."""

    is_complete: bool
    """See `Translation`."""

    source_tokens: int
    """Of the prompt, its end included."""


@dataclass
class _Search:
    """The search for the translation of one source."""

    source: int
    """Its place in the batch."""

    scores: Tensor = field(default_factory=lambda: torch.zeros(1))
    """(hypotheses,) log-probabilities of those that go on, best first."""

    tokens: list[list[int]] = field(default_factory=lambda: [[]])
    """Their tokens."""

    ended: list[Translation] = field(default_factory=list)
    """The best that have ended, at most as many as hypotheses go on."""

    def step(self, logs: Tensor, eod: int, beams: Beams) -> list[int]:
        """Add a token to the hypotheses; returns the earlier hypothesis of each.

        logs: (hypotheses, V) log-probabilities of their next tokens.
        """
        totals = self.scores[:, None] + logs
        # Each hypothesis can end in one way, so that enough of these go on.
        best = totals.flatten().topk(min(2 * beams.count, totals.numel()))
        parents: list[int] = []
        tokens, scores = [], []
        for rank, (score, place) in enumerate(zip(best.values.tolist(), best.indices.tolist())):
            parent, token = divmod(place, logs.shape[1])
            text = self.tokens[parent]
            if token == eod:
                if rank < beams.count:
                    self.ended.append(Translation(text, beams.score(score, len(text) + 1), is_complete=True))
            elif len(parents) < beams.count:
                parents.append(parent)
                tokens.append([*text, token])
                scores.append(score)
        self.ended = sorted(self.ended, key=lambda text: -text.score)[: beams.count]
        self.tokens, self.scores = tokens, torch.tensor(scores)
        return parents

    def is_over(self, beams: Beams, most_tokens: int) -> bool:
        """Whether to end the search: no hypothesis is as good as those that have ended, or all are too long."""
        length = len(self.tokens[0])
        if length >= most_tokens:
            return True
        if len(self.ended) < beams.count:
            return False
        return beams.count == 1 or self.ended[-1].score >= beams.score(float(self.scores[0]), length)

    def best(self, beams: Beams) -> Translation:
        """The text with the best score, of those that have ended and those that still go on."""
        score = beams.score(float(self.scores[0]), len(self.tokens[0]))
        # A bad early end would otherwise hide a text that merely was not finished within the most tokens.
        if self.ended and self.ended[0].score >= score:
            return self.ended[0]
        return Translation(self.tokens[0], score, is_complete=False)


def translate_texts(
    folder: Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int | None = None,
    beams: Beams = _BEAMS,
    batch_size: int = 32,
    step: int | None = None,
) -> Iterator[TranslatedText]:
    """Translate texts with an encoder-decoder that is loaded once; yields each whole translation.

    Args:
        folder: a run folder.
        prompts: texts to translate.
        max_new_tokens: maximum number of tokens of a translation; None: `NEW_TOKENS`, or as many positions as the model
            has parameters for, if they are fewer.
        beams: how translations are searched for.
        batch_size: hypotheses in progress at once.
        step: step of a run's checkpoint; None takes the newest good one.

    Raises:
        UserError: for no model, checkpoint or tokenizer, a model that does not translate, a prompt that is empty or not
            valid UTF-8, or more tokens than positions that the model has parameters for.
    """
    opened = find_model(folder, step)
    if opened.config.model.encoder is None:
        raise UserError(
            f"model.kind={opened.config.model.kind} of {folder} does not translate; give a run of an encoder_decoder"
        )
    tokenizer, limit = opened.tokenizer, opened.config.most_positions
    sources = []
    for number, prompt in enumerate(prompts, 1):
        check_text(prompt)
        if not prompt.strip():
            raise UserError(f"prompt {number} is empty, which nothing translates; write a text")
        sources.append([*tokenizer.prefix, *tokenizer.encode(prompt), tokenizer.eod])
        if limit is not None and len(sources[-1]) > limit:
            raise UserError(
                f"prompt {number} has {len(sources[-1])} tokens with its end, and the model {limit} positions; "
                "shorten it"
            )
    if max_new_tokens is None:
        max_new_tokens = min(NEW_TOKENS, limit or NEW_TOKENS)
    elif limit is not None and max_new_tokens > limit:
        raise UserError(
            f"max_new_tokens={max_new_tokens} exceeds the model's {limit} positions; give at most {limit}"
        )
    model, _ = opened.load()
    found = translate(
        model,
        sources,
        eod=tokenizer.eod,
        vocab_size=tokenizer.vocab_size,
        most_tokens=max_new_tokens,
        beams=beams,
        batch_size=batch_size,
    )
    return (
        TranslatedText(
            prompt=index,
            sample=0,
            text=tokenizer.decode(text.tokens),
            is_last=True,
            is_complete=text.is_complete,
            source_tokens=len(sources[index]),
        )
        for index, text in found
    )


def translate_sources(
    opened: OpenedModel,
    model: "LanguageModel",
    sources: Sequence[Sequence[int]],
    *,
    most_tokens: int,
    beams: int,
    length_penalty: float,
) -> Iterator[tuple[int, str, bool]]:
    """Yield (index, translation, whether it has an end) of sources, the ids of each with its end, as each is found."""
    tokenizer = opened.tokenizer
    for index, text in translate(
        model,
        sources,
        eod=tokenizer.eod,
        vocab_size=tokenizer.vocab_size,
        most_tokens=most_tokens,
        beams=Beams(beams, length_penalty),
        batch_size=_EVALUATED,
    ):
        yield index, tokenizer.decode(text.tokens), text.is_complete


@torch.inference_mode()
def translate(
    model: "LanguageModel",
    sources: Sequence[Sequence[int]],
    *,
    eod: int,
    vocab_size: int,
    most_tokens: int,
    beams: Beams = _BEAMS,
    batch_size: int = 32,
) -> Iterator[tuple[int, Translation]]:
    """Yield (index, translation) of sources, the ids of each with its end, batch by batch from the shortest on.

    model: an encoder-decoder in evaluation mode. eod: starts and ends a target. vocab_size: ids of the tokenizer.
    most_tokens: of a translation, its end included. batch_size: hypotheses at the same time, at least one source's.
    """
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    size = max(1, batch_size // beams.count)
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        searches = _batch(model, [sources[index] for index in batch], eod, vocab_size, most_tokens, beams)
        for index, search in zip(batch, searches):
            yield index, search.best(beams)


def _batch(
    model: "LanguageModel",
    sources: Sequence[Sequence[int]],
    eod: int,
    vocab_size: int,
    most_tokens: int,
    beams: Beams,
) -> list[_Search]:
    """The finished searches for translations of these sources."""
    device, longest = model.output_matrix.device, max(map(len, sources))
    tokens = torch.tensor([[*ids, *[eod] * (longest - len(ids))] for ids in sources], device=device)
    places = torch.arange(longest, device=device)
    real = places < torch.tensor([len(ids) for ids in sources], device=device)[:, None]
    memory = model.encode(tokens, places.where(real, PADDING))
    last = torch.full((len(sources), 1), eod, device=device)
    hidden, states = model.extend_target(last, 0, None, memory, real)
    searches = [_Search(index) for index in range(len(sources))]
    live, length = searches, 1
    while live:
        logits = model.logits(hidden[-1:])[:, 0, :vocab_size]
        rows = iter(F.log_softmax(logits.float(), -1).cpu())
        of_rows = [search.source for search in live for _ in search.tokens]
        chosen, first = [], 0
        for search in live:
            count = len(search.tokens)
            parents = search.step(torch.stack([next(rows) for _ in range(count)]), eod, beams)
            if not search.is_over(beams, most_tokens):
                chosen += [first + parent for parent in parents]
            first += count
        live = [search for search in live if not search.is_over(beams, most_tokens)]
        if live:
            states = _reordered(states, chosen, of_rows, length)
            last = torch.tensor([text[-1:] for search in live for text in search.tokens], device=device)
            hidden, states = model.extend_target(last, length, states)
            length += 1
    return searches


def _reordered(states: list[Any], rows: list[int], sources: list[int], length: int) -> list[Any]:
    """The states of these rows. sources: that of each row now; length: tokens that the states have read."""
    # What is kept of a source is the same for all its hypotheses.
    keeps = [sources[row] for row in rows] == sources
    return [
        (select_rows(own, rows, length), of_source if keeps else select_rows(of_source, rows, length))
        for own, of_source in states
    ]

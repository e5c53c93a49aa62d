"""Many texts under way at once: they join the batch when they come and leave it when they end."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from data_pipeline.tokenizers import Tokenizer
from megakernel.config import Config, UserError

from . import states
from .decoding import Decoder
from .sampling import DEFAULT, Draw, Sampling, choose, uniform
from .text import CONTEXT, StopStrings, TextStream

if TYPE_CHECKING:
    from megakernel.model import LanguageModel

Finish = Literal["stop", "length"]
"""Why a text ended: the model or a stop string ended it, or it has all the tokens that were asked for."""

PROMPT_CHUNK = 512
"""Tokens of a prompt that are read between two steps of the texts under way, at most."""


class Behind(NamedTuple):
    """Where a text stands, to go on from."""

    decoder: Decoder
    """Of this text alone."""

    context: list[int]
    """Its last tokens, CONTEXT at most."""

    unread: list[int]
    """Those of them that the decoder has not read yet."""

    tokens: int
    """Of the whole text."""

    seen: frozenset[int] = frozenset()
    """All different ones of these, which the repetition penalty meets."""


@dataclass(frozen=True)
class Request:
    """A text to continue."""

    tokens: Sequence[int]
    """The prompt; with `behind` what follows there, which may be nothing."""

    max_new_tokens: int
    sampling: Sampling = DEFAULT
    seed: int = 0
    sample: int = 0
    """Which of several continuations that are drawn with one seed."""

    stop: Sequence[str] = ()
    """Strings that end the text before them."""

    ends: frozenset[int] = frozenset()
    """Tokens that end it."""

    logprobs: int | None = None
    """Of how many likeliest tokens the probabilities are told beside the chosen one's; None: of none."""

    behind: Behind | None = None
    """What it continues; None: nothing."""

    keeps_state: bool = False
    """Whether the text can be gone on from when it has ended (`Text.behind`)."""


class Chosen(NamedTuple):
    """A token and its log probability, without temperature and what else draws leave out."""

    token: int
    logprob: float
    likeliest: list[tuple[int, float]]
    """The likeliest tokens, in order."""


@dataclass(eq=False)
class Text:
    """A request under way."""

    request: Request
    stream: TextStream
    stops: StopStrings
    unread: list[int]
    """The prompt's tokens that no decoder has read, then the last token alone."""

    seen: set[int]
    """All different tokens of the text so far, which the repetition penalty meets."""

    new_tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    behind: Behind | None = None
    """Where it stands, once it has ended, if the request wants to know."""

    def draw(self) -> Draw:
        """How its next token is drawn."""
        request = self.request
        seen = None
        if request.sampling.repetition_penalty != 1:
            seen = torch.tensor(list(self.seen), dtype=torch.int64)
        return Draw(request.sampling, uniform(request.seed, request.sample, len(self.new_tokens)), seen)


class Step(NamedTuple):
    """What became of a text by one token."""

    text: Text
    piece: str
    """Text that is now certain, which may be empty."""

    chosen: Chosen | None
    """Where log probabilities are wanted, and the token does not end the text."""


@dataclass(eq=False)
class _Batch:
    """Texts whose states lie side by side."""

    decoder: Decoder
    texts: list[Text]


class Engine:
    """Continues texts with one model, a token of each in every step.

    States of kernelized and windowed layers have one size, so a text that joins or leaves costs a copy of its rows and
    no other text waits for it. Keys and values of full softmax layers are padded in front to those of the longest text
    of the batch, which is what they cost. Mechanisms that keep something else for each token (EVA, landmarks under a
    softmax) are decoded text by text.

    A text depends on its request alone, up to the rounding of matrix products of other numbers of rows.
    """

    def __init__(
        self, model: "LanguageModel", tokenizer: Tokenizer, *, isolate_documents: bool, max_batch: int = 32
    ):
        """max_batch: texts under way at once; others wait for their turn."""
        self._model, self.tokenizer = model, tokenizer
        # A template that ends messages as documents end does not tell where a conversation does.
        self._isolate = isolate_documents and not tokenizer.ends_messages
        self._max_batch = max_batch
        self._waiting: deque[Text] = deque()
        self._reading: deque[tuple[Text, Decoder]] = deque()
        self._batches: list[_Batch] = []

    @property
    def waiting(self) -> int:
        """Texts that have not begun."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Texts that have begun and not ended."""
        return len(self._reading) + sum(len(batch.texts) for batch in self._batches)

    def new_decoder(self) -> Decoder:
        """A decoder of one text that has not begun."""
        return Decoder(self._model, self.tokenizer.eod, self._isolate, PROMPT_CHUNK)

    def add(self, request: Request) -> Text:
        """Line a text up; at least one token is to be read, of the request or of what it continues."""
        before = request.behind
        unread = [*(before.unread if before else ()), *request.tokens]
        assert unread
        said = [*(before.context if before else ()), *request.tokens]
        seen = {*(before.seen if before else ()), *request.tokens}
        text = Text(request, TextStream(self.tokenizer, said), StopStrings(request.stop), unread, seen)
        self._waiting.append(text)
        return text

    def remove(self, text: Text) -> None:
        """Forget a text wherever it stands, and free what it holds."""
        if text in self._waiting:
            self._waiting.remove(text)
        self._reading = deque(pair for pair in self._reading if pair[0] is not text)
        for batch in self._batches:
            if text in batch.texts:
                self._keep(batch, [other for other in batch.texts if other is not text])

    def step(self) -> list[Step]:
        """Read a chunk of one prompt, and a token of every text under way; what became of each."""
        while self._waiting and self.running < self._max_batch:
            text = self._waiting.popleft()
            before = text.request.behind
            # Of what it continues a copy: other texts may go on from there, too.
            self._reading.append((text, self.new_decoder() if before is None else before.decoder.alone(0)))
        steps: list[Step] = []
        batches = list(self._batches)  # without the text whose prompt ends now: it has its token
        if self._reading:
            steps += self._read_prompt()
        for batch in batches:
            logits = batch.decoder.read([text.unread for text in batch.texts])
            steps += self._advance(batch, logits)
        return steps

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Step]]:
        """Continue all of some texts; each step with the place of its request."""
        places = {self.add(request): place for place, request in enumerate(requests)}
        while places:
            for step in self.step():
                yield places[step.text], step
                if step.text.finish is not None:
                    del places[step.text]

    def _read_prompt(self) -> list[Step]:
        text, decoder = self._reading[0]
        chunk, text.unread = text.unread[:PROMPT_CHUNK], text.unread[PROMPT_CHUNK:]
        logits = decoder.read([chunk])
        if text.unread:
            self._reading.rotate(-1)  # so that no short prompt waits for the end of a long one
            return []
        self._reading.popleft()
        batch = _Batch(decoder, [text])
        self._batches.append(batch)
        steps = self._advance(batch, logits)
        if batch.texts:
            self._merge(batch)
        return steps

    def _merge(self, new: _Batch) -> None:
        for batch in self._batches:
            if batch is new:
                continue
            try:
                batch.decoder.join(new.decoder)
            except states.Apart:
                continue
            batch.texts += new.texts
            self._batches.remove(new)
            return

    def _advance(self, batch: _Batch, logits: Tensor) -> list[Step]:
        """Choose the next token of each text from logits (B, V)."""
        # A model may have more ids than its tokenizer: special ones, or those that a dense model came with.
        logits = logits[:, : self.tokenizer.vocab_size]
        tokens = choose(logits, [text.draw() for text in batch.texts])
        steps = [
            self._took(text, token, logits[row]) for row, (text, token) in enumerate(zip(batch.texts, tokens))
        ]
        for row, text in enumerate(batch.texts):
            if text.finish is not None and text.request.keeps_state:
                text.behind = self._behind(text, batch.decoder.alone(row))
        going = [text for text in batch.texts if text.finish is None]
        if len(going) < len(batch.texts):
            self._keep(batch, going)
        return steps

    def _took(self, text: Text, token: int, logits: Tensor) -> Step:
        request, chosen = text.request, None
        if token in request.ends:
            text.finish, text.unread = "stop", []
            return Step(text, text.stops.add(text.stream.end()) + text.stops.end(), None)
        if request.logprobs is not None:
            chosen = _with_probability(token, logits, request.logprobs)
        text.new_tokens.append(token)
        text.seen.add(token)
        text.unread = [token]
        piece = text.stops.add(text.stream.add(token))
        if text.stops.met:
            text.finish = "stop"
        elif len(text.new_tokens) == request.max_new_tokens:
            text.finish = "length"
            piece += text.stops.add(text.stream.end())
            if text.stops.met:
                text.finish = "stop"
            piece += text.stops.end()
        return Step(text, piece, chosen)

    def _behind(self, text: Text, decoder: Decoder) -> Behind:
        before = text.request.behind
        own = [*text.request.tokens, *text.new_tokens]
        count = (before.tokens if before else 0) + len(own)
        context = [*(before.context if before else ()), *own][-CONTEXT:]
        return Behind(decoder, context, list(text.unread), count, frozenset(text.seen))

    def _keep(self, batch: _Batch, texts: list[Text]) -> None:
        if texts:
            batch.decoder.keep([batch.texts.index(text) for text in texts])
        elif batch in self._batches:
            self._batches.remove(batch)
        batch.texts = texts


def _with_probability(token: int, logits: Tensor, count: int) -> Chosen:
    logs = logits.float().log_softmax(-1)
    best = logs.topk(min(count, len(logs)))
    likeliest = list(zip(best.indices.tolist(), best.values.tolist()))
    return Chosen(token, float(logs[token]), likeliest)


def most_tokens(config: Config) -> int | None:
    """Of a prompt and what follows it together, where the model has learned positions; None: no limit."""
    rows = config.model.max_positions or config.training.seq_len
    return rows + 1 if config.model.position == "learned" else None


def check_positions(config: Config, prompt: int, new: int, key: str) -> None:
    """UserError, naming `key`, where `new` tokens behind a prompt are more than the model has positions for."""
    most = most_tokens(config)
    if most is not None and prompt + new > most:
        raise UserError(
            f"{key}={new} after a prompt of {prompt} tokens exceeds the model's {most - 1} learned positions; "
            f"give at most {max(most - prompt, 0)}, or a shorter prompt"
        )

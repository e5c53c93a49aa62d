"""Continuous batching: texts join the batch when they arrive and leave it when they end."""

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
"""Why a text ended: by an end token or stop string, or by its maximum number of tokens."""

PROMPT_CHUNK = 512
"""Maximum tokens of a prompt that are read between two steps of the running texts."""

_SCORED_CHUNK = 64
"""Tokens of a prompt whose logits exist at a time."""


class TextState(NamedTuple):
    """The state of an ended text, from which it can be continued."""

    decoder: Decoder
    """Decoder of this text only."""

    context: list[int]
    """Its last tokens, at most CONTEXT."""

    unread: list[int]
    """Its last tokens that the decoder has not read yet."""

    tokens: int
    """Number of tokens of the whole text."""

    seen: frozenset[int] = frozenset()
    """The set of its tokens, for the repetition penalty."""


@dataclass(frozen=True)
class TextRequest:
    """A text to continue."""

    tokens: Sequence[int]
    """The prompt; with `previous`, the tokens that follow it, which may be empty."""

    max_new_tokens: int
    """0: the text ends once its prompt is read."""

    sampling: Sampling = DEFAULT
    seed: int = 0
    sample: int = 0
    """Index among several continuations with one seed."""

    stop: Sequence[str] = ()
    """Strings before which the text ends."""

    ends: frozenset[int] = frozenset()
    """Tokens that end the text."""

    logprobs: int | None = None
    """Number of most likely tokens to report with the chosen token's log-probability; None: report nothing."""

    echo: str | None = None
    """Text of the prompt, returned before the continuation. With `logprobs` its tokens are reported too, and so is a
    token that ends the text. None: the continuation alone."""

    previous: TextState | None = None
    """The text to continue; None for a new one."""

    keeps_state: bool = False
    """Whether to keep the ended text's state (`Text.final_state`)."""


class Chosen(NamedTuple):
    """A token and its log-probability under the model, before temperature, penalty and filters."""

    token: int
    logprob: float | None
    """None for the first token of a text."""

    top_tokens: list[tuple[int, float]]
    """The most likely tokens with their log-probabilities, in order."""


@dataclass(eq=False)
class Text:
    """A request in progress."""

    request: TextRequest
    stream: TextStream
    stops: StopStrings
    unread: list[int]
    """The prompt's tokens; after the prompt, the last token."""

    seen: set[int]
    """The set of the text's tokens so far, for the repetition penalty."""

    prompt_read: int = 0
    """Number of the prompt's tokens that are read."""

    scored: list[Chosen] = field(default_factory=list)
    """The prompt's tokens that are read, if they are reported."""

    ahead: Tensor | None = None
    """Logits (V,) of the token after those."""

    new_tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    final_state: TextState | None = None
    """Its state once it has ended, if the request has `keeps_state`."""

    def draw(self) -> Draw:
        """The parameters of drawing its next token."""
        request = self.request
        seen = None
        if request.sampling.repetition_penalty != 1:
            seen = torch.tensor(list(self.seen), dtype=torch.int64)
        return Draw(request.sampling, uniform(request.seed, request.sample, len(self.new_tokens)), seen)


class TextStep(NamedTuple):
    """The result of one token for a text."""

    text: Text
    piece: str
    """New text that is final; may be empty."""

    chosen: Sequence[Chosen]
    """If log-probabilities are requested, the new token, unless it ends the text; with `echo` after the prompt's."""


@dataclass(eq=False)
class _Batch:
    """Texts whose states are batched."""

    decoder: Decoder
    texts: list[Text]


class GenerationEngine:
    """Continues texts with one model; every step adds a token to each.

    States of kernelized and windowed layers have a constant size, so a text joins or leaves by a copy of its rows. Keys
    and values of full softmax layers are left-padded to the longest text of the batch. Mechanisms with other growing
    states (EVA, landmarks under a softmax) are decoded text by text.

    A text depends only on its request, up to the rounding of matrix products with other batch sizes.
    """

    def __init__(
        self, model: "LanguageModel", tokenizer: Tokenizer, *, isolate_documents: bool, max_batch: int = 32
    ):
        """max_batch: texts in progress at once; others wait."""
        self._model, self.tokenizer = model, tokenizer
        # If the chat template writes eod after messages, eod does not mark the end of a conversation.
        self._isolate = isolate_documents and not tokenizer.ends_messages
        self._max_batch = max_batch
        self._waiting: deque[Text] = deque()
        self._reading: deque[tuple[Text, Decoder]] = deque()
        self._batches: list[_Batch] = []

    @property
    def waiting(self) -> int:
        """Number of texts that have not started."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of texts in progress."""
        return len(self._reading) + sum(len(batch.texts) for batch in self._batches)

    def new_decoder(self) -> Decoder:
        """A decoder of one empty text."""
        return Decoder(self._model, self.tokenizer.eod, self._isolate, PROMPT_CHUNK)

    def add(self, request: TextRequest) -> Text:
        """Queue a text; the request and its `previous` have at least one unread token."""
        previous = request.previous
        unread = [*(previous.unread if previous else ()), *request.tokens]
        assert unread
        context = [*(previous.context if previous else ()), *request.tokens[-CONTEXT:]]
        seen = {*(previous.seen if previous else ()), *request.tokens}
        text = Text(request, TextStream(self.tokenizer, context), StopStrings(request.stop), unread, seen)
        self._waiting.append(text)
        return text

    def remove(self, text: Text) -> None:
        """Drop a text, whatever its progress, and free its state."""
        if text in self._waiting:
            self._waiting.remove(text)
        self._reading = deque(pair for pair in self._reading if pair[0] is not text)
        for batch in self._batches:
            if text in batch.texts:
                self._keep_texts(batch, [other for other in batch.texts if other is not text])

    def step(self) -> list[TextStep]:
        """Read a chunk of one prompt, and a token of every running text; returns the texts' new tokens."""
        while self._waiting and self.running < self._max_batch:
            text = self._waiting.popleft()
            previous = text.request.previous
            # `extract` copies the state: other texts may continue from it as well.
            decoder = self.new_decoder() if previous is None else previous.decoder.extract(0)
            self._reading.append((text, decoder))
        steps: list[TextStep] = []
        for batch in list(self._batches):
            logits = batch.decoder.read([text.unread for text in batch.texts])
            steps += self._advance(batch, logits)
        if self._reading:  # last, because a text whose prompt ends now joins a batch and has a token already
            steps += self._read_prompt()
        return steps

    def run(self, requests: Iterable[TextRequest]) -> Iterator[tuple[int, TextStep]]:
        """Continue all requests to their ends; yields each step with the index of its request."""
        indices = {self.add(request): index for index, request in enumerate(requests)}
        while indices:
            for step in self.step():
                yield indices[step.text], step
                if step.text.finish is not None:
                    del indices[step.text]

    def _read_prompt(self) -> list[TextStep]:
        text, decoder = self._reading[0]
        chunk = text.unread[text.prompt_read : text.prompt_read + PROMPT_CHUNK]
        hidden = decoder.hidden([chunk])
        if text.request.echo is not None and text.request.logprobs is not None:
            self._score(text, chunk, decoder, hidden)
        text.prompt_read += len(chunk)
        if text.prompt_read < len(text.unread):
            self._reading.rotate(-1)  # a short prompt need not wait for the end of a long one
            return []
        self._reading.popleft()
        text.ahead = None
        batch = _Batch(decoder, [text])
        if text.request.max_new_tokens == 0:
            text.finish, text.unread = "length", []
            self._keep_final_states(batch)
            return [TextStep(text, text.request.echo or "", text.scored)]
        self._batches.append(batch)
        steps = self._advance(batch, decoder.logits(hidden[-1:])[:, 0])
        if batch.texts:
            self._merge(batch)
        return steps

    def _merge(self, new: _Batch) -> None:
        for batch in self._batches:
            if batch is new:
                continue
            try:
                batch.decoder.append(new.decoder)
            except states.NotBatchableError:
                continue
            batch.texts += new.texts
            self._batches.remove(new)
            return

    def _advance(self, batch: _Batch, logits: Tensor) -> list[TextStep]:
        """Draw the next token of each text from logits (B, V)."""
        # A model may have more ids than its tokenizer: special ones, or padding rows of a dense model.
        logits = logits[:, : self.tokenizer.vocab_size]
        tokens = choose(logits, [text.draw() for text in batch.texts])
        steps = [
            self._append_token(text, token, row) for text, token, row in zip(batch.texts, tokens, logits)
        ]
        self._keep_final_states(batch)
        unfinished = [text for text in batch.texts if text.finish is None]
        if len(unfinished) < len(batch.texts):
            self._keep_texts(batch, unfinished)
        return steps

    def _append_token(self, text: Text, token: int, logits: Tensor) -> TextStep:
        request = text.request
        before, chosen = ("", []) if text.new_tokens else (request.echo or "", text.scored)
        # Clients that score a prompt leave out the last token reported, which has to be there then.
        if request.logprobs is not None and (request.echo is not None or token not in request.ends):
            chosen = [*chosen, *_with_logprobs([token], logits[None], request.logprobs)]
        if token in request.ends:
            text.finish, text.unread = "stop", []
            return TextStep(text, before + text.stops.add(text.stream.end()) + text.stops.end(), chosen)
        text.new_tokens.append(token)
        text.seen.add(token)
        text.unread = [token]
        piece = before + text.stops.add(text.stream.add(token))
        if text.stops.matched:
            text.finish = "stop"
        elif len(text.new_tokens) == request.max_new_tokens:
            text.finish = "length"
            piece += text.stops.add(text.stream.end())
            if text.stops.matched:
                text.finish = "stop"
            piece += text.stops.end()
        return TextStep(text, piece, chosen)

    def _score(self, text: Text, tokens: Sequence[int], decoder: Decoder, hidden: Tensor) -> None:
        """Add a chunk of the prompt to `scored`; hidden: its final hidden states (N, 1, hidden)."""
        assert text.request.logprobs is not None
        for start in range(0, len(tokens), _SCORED_CHUNK):
            end = start + _SCORED_CHUNK
            after = decoder.logits(hidden[start:end])[0, :, : self.tokenizer.vocab_size]
            if text.ahead is None:
                text.scored.append(Chosen(tokens[0], None, []))
                scored, logits = tokens[start + 1 : end], after[:-1]
            else:
                scored, logits = tokens[start:end], torch.cat([text.ahead[None], after[:-1]])
            text.scored += _with_logprobs(scored, logits, text.request.logprobs)
            text.ahead = after[-1].clone()  # a view would keep the whole chunk

    def _keep_final_states(self, batch: _Batch) -> None:
        for row, text in enumerate(batch.texts):
            if text.finish is not None and text.request.keeps_state:
                # In host memory: a GPU has little room for states of texts that do not run.
                text.final_state = self._text_state(text, batch.decoder.extract(row, "cpu"))

    def _text_state(self, text: Text, decoder: Decoder) -> TextState:
        previous = text.request.previous
        tokens = [*text.request.tokens, *text.new_tokens]
        count = (previous.tokens if previous else 0) + len(tokens)
        context = [*(previous.context if previous else ()), *tokens][-CONTEXT:]
        return TextState(decoder, context, list(text.unread), count, frozenset(text.seen))

    def _keep_texts(self, batch: _Batch, texts: list[Text]) -> None:
        if texts:
            batch.decoder.keep([batch.texts.index(text) for text in texts])
        elif batch in self._batches:
            self._batches.remove(batch)
        batch.texts = texts


def _with_logprobs(tokens: Sequence[int], logits: Tensor, count: int) -> list[Chosen]:
    """Tokens with their log-probabilities and the `count` most likely ones in their places, from logits (N, V)."""
    logs = logits.float().log_softmax(-1)
    best = logs.topk(min(count, logs.shape[-1]))
    own = logs.gather(-1, torch.tensor(tokens, dtype=torch.int64, device=logs.device)[:, None])[:, 0].tolist()
    top_tokens = zip(best.indices.tolist(), best.values.tolist())
    return [
        Chosen(token, logprob, list(zip(*top)))
        for token, logprob, top in zip(tokens, own, top_tokens, strict=True)
    ]


def position_limit(config: Config) -> int | None:
    """The limit of learned positions on prompt and new tokens together; None: no limit."""
    positions = config.most_positions
    return None if positions is None else positions + 1  # the last new token is not read


def check_positions(config: Config, prompt: int, new: int, key: str) -> None:
    """UserError, naming `key`, if `new` tokens after a prompt of `prompt` tokens exceed the learned positions."""
    limit = position_limit(config)
    if limit is not None and prompt + max(new, 1) > limit:  # the last new token is not read
        raise UserError(
            f"{key}={new} after a prompt of {prompt} tokens exceeds the model's {limit - 1} learned positions; "
            f"give at most {max(limit - prompt, 0)}, or a shorter prompt"
        )

"""The thread that owns the model: it takes requests from a queue and sends pieces of text to their asyncio tasks."""

import asyncio
import copy
import logging
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from data_pipeline.chat import ChatTemplate, Message
from megakernel.checkpoint.opened import OpenedModel
from megakernel.config import RunFailed

from ..engine import (
    Chosen,
    Finish,
    GenerationEngine,
    Text,
    TextRequest,
    TextState,
    TextStep,
    check_positions,
    position_limit,
)
from ..run import check_text, prompt_tokens
from ..states import softmax_bytes_per_token
from ..text import TokenBytes
from . import sessions
from .protocol import Body, ChatBody, CompletionBody, Refusal

_log = logging.getLogger(__name__)
T = TypeVar("T")

SHORT_BYTES = 2**16
"""Requests up to this length are not read behind longer ones."""

COMPLETION_TOKENS = 16
"""Default number of new tokens of a completion, as for OpenAI."""


class Prompt(NamedTuple):
    """The tokens to read for a request."""

    tokens: list[int]
    previous: TextState | None = None
    messages: list[Message] | None = None
    """The whole conversation."""

    echo: str | None = None
    """Its text, if that is returned."""


class Piece(NamedTuple):
    """The result of one step for one of a request's texts."""

    choice: int
    text: str
    chosen: Sequence[Chosen]
    finish: Finish | None


@dataclass(eq=False)
class GenerationJob:
    """One request in progress, with its texts."""

    body: Body
    texts: list[Text]
    prompt: Prompt
    """The last of its prompts; with a session, its only one."""

    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[Piece | Exception] = field(default_factory=asyncio.Queue)
    text: str = ""
    """The generated text, if a session is kept."""

    times: list[float] = field(default_factory=list)
    """Seconds on a clock at the first token and at the last one, if a session is kept."""

    drawn: int = 0
    """Tokens that were drawn, if a session is kept."""

    async def read(self) -> AsyncIterator[Piece]:
        """All pieces as they are generated. Raises RunFailed if the server fails."""
        running = len(self.texts)
        while running:
            piece = await self.pieces.get()
            if isinstance(piece, Exception):
                raise piece
            running -= piece.finish is not None
            yield piece

    def add_token(self, piece: str) -> None:
        """Note a token of a session's text: its piece, and the time."""
        self.text += piece
        self.drawn += 1
        self.times = [*self.times[:1], time.perf_counter()]

    @property
    def tokens_per_second(self) -> float | None:
        """Speed after the first token, which waits for the prompt; None with one token."""
        return (self.drawn - 1) / (self.times[-1] - self.times[0]) if self.drawn > 1 else None

    def put(self, piece: Piece | Exception) -> None:
        """Send a piece to the request's task; called on the model's thread."""
        with suppress(RuntimeError):  # the loop is closed, so nobody reads
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    @property
    def usage(self) -> dict[str, object]:
        """Token counts as OpenAI's: earlier tokens of a session count as cached tokens of the prompt."""
        cached = self.prompt.previous.tokens if self.prompt.previous else 0
        per_prompt = self.texts[:: self.body.n or 1]
        prompt = cached + sum(len(text.request.tokens) for text in per_prompt)
        new = sum(len(text.new_tokens) for text in self.texts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class Reader:
    """A thread that turns requests into tokens, so that neither the model nor the server waits for a long prompt.

    It has a tokenizer of its own: those of `transformers` change their settings when they encode.
    """

    def __init__(self, opened: OpenedModel, name: str):
        self.opened = replace(opened, tokenizer=copy.deepcopy(opened.tokenizer))
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending: set[Future[Any]] = set()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function on the thread, and return its result. Raises RunFailed if the server stops before that."""
        future: Future[T] = Future()

        def run() -> None:
            with suppress(InvalidStateError):  # the server stopped meanwhile
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)

        self._pending.add(future)
        try:
            self._inbox.put(run)
            return await asyncio.wrap_future(future)
        finally:
            self._pending.discard(future)

    def close(self) -> None:
        """End the thread after what it does now, whose result nobody waits for."""
        self._inbox.put(None)
        for future in list(self._pending):
            with suppress(InvalidStateError):
                future.set_exception(_stopped_error())

    def _work(self) -> None:
        while (task := self._inbox.get()) is not None:
            task()


class Worker:
    """Runs the engine. Only its thread changes model and sessions, so that no locks are needed."""

    def __init__(self, opened: OpenedModel, *, batch_size: int, max_sessions: int, max_new_tokens: int):
        """Load the weights and start the thread. max_new_tokens: the most that a text may have."""
        self.opened, self.tokenizer = opened, opened.tokenizer
        self.token_bytes = TokenBytes(copy.deepcopy(opened.tokenizer))  # for the server's thread
        self._batch_size, self._max_new_tokens = batch_size, max_new_tokens
        self._model, _ = opened.load()
        self._ends = opened.ends
        self._engine = self._new_engine()
        self._jobs: dict[Text, tuple[GenerationJob, int]] = {}
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.sessions = sessions.Sessions(max_sessions)
        self.fingerprint = sessions.fingerprint(opened, self._model)
        self.softmax_bytes_per_token = softmax_bytes_per_token(self._model)
        self._readers = [Reader(opened, name) for name in ("short requests", "long requests")]
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Abort all texts and end the threads."""
        self._inbox.put(None)
        for reader in self._readers:
            reader.close()

    @property
    def health(self) -> dict[str, object]:
        """Whether the thread is alive, and the numbers of texts and sessions."""
        return {
            "status": "ok" if self._thread.is_alive() else "stopped",
            "running": self._engine.running,
            "waiting": self._engine.waiting,
            "sessions": len(self.sessions),
        }

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the model's thread, between two steps, and return its result."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(run)
        if not self._thread.is_alive():
            raise _stopped_error()
        return await asyncio.shield(asyncio.wrap_future(future))

    def reader(self, length: int) -> Reader:
        """The thread that reads requests of this length in bytes."""
        return self._readers[length > SHORT_BYTES]

    async def submit(self, body: Body, reader: Reader) -> GenerationJob:
        """Start a request, whose prompt `reader` turns into tokens. Raises UserError for an invalid one."""
        loop = asyncio.get_running_loop()
        name = body.session
        session = None if name is None else await self.call(lambda: self.sessions.acquire(name))
        try:
            prompts, requests = await reader.run(lambda: self._read(body, session, reader.opened))
            return await self.call(lambda: self._start(body, prompts[-1], requests, loop))
        except BaseException:
            if name is not None:
                self._inbox.put(lambda: self.sessions.release(name, None))
            raise

    def remove(self, job: GenerationJob) -> None:
        """Abort those texts of a request that have not ended."""
        self._inbox.put(lambda: self._remove(job))

    async def restore(self, name: str, data: bytes) -> sessions.Session:
        """Load a session from a file and store it. Raises Refusal for an invalid file."""
        # Parsing a large file takes seconds, for which the model need not wait.
        content = await asyncio.to_thread(sessions.read_file, data, self.opened, self.fingerprint)

        def store() -> sessions.Session:
            session = sessions.restored(content, self._engine)
            self.sessions.store(name, session)
            return session

        return await self.call(store)

    def _new_engine(self) -> GenerationEngine:
        isolate = self.opened.config.data.isolate_documents
        size = self._batch_size
        return GenerationEngine(self._model, self.tokenizer, isolate_documents=isolate, max_batch=size)

    def _work(self) -> None:
        while True:
            busy = bool(self._jobs)
            try:
                with suppress(queue.Empty):
                    while True:
                        task = self._inbox.get(block=not busy)
                        if task is None:
                            self._fail(_stopped_error())
                            return
                        task()
                        busy = True
                for step in self._engine.step():
                    self._handle_step(step)
            except Exception as error:
                # The state of the batches is unknown, but the model is intact: start a new engine.
                _log.exception("a step of the model failed")
                self._fail(RunFailed(f"a step of the model failed ({type(error).__name__}: {error})"))
                self._engine = self._new_engine()

    def _fail(self, error: Exception) -> None:
        for job in {job for job, _ in self._jobs.values()}:
            job.put(error)
            self._end_session(job, None)
        self._jobs.clear()

    def _handle_step(self, step: TextStep) -> None:
        job, choice = self._jobs[step.text]
        if job.body.session is not None:
            job.add_token(step.piece)
        if step.text.finish is not None:
            del self._jobs[step.text]
            self._end_session(job, step.text)
        job.put(Piece(choice, step.piece, step.chosen, step.text.finish))

    def _end_session(self, job: GenerationJob, text: Text | None) -> None:
        name = job.body.session
        if name is None:
            return
        session = None
        if text is not None:
            assert text.final_state is not None
            messages = job.prompt.messages
            if messages is not None:
                messages = [*messages, {"role": "assistant", "content": job.text}]
            session = sessions.Session(text.final_state, messages, tokens_per_second=job.tokens_per_second)
        self.sessions.release(name, session)

    def _remove(self, job: GenerationJob) -> None:
        left = [text for text in job.texts if text in self._jobs]
        for text in left:
            self._engine.remove(text)
            del self._jobs[text]
        if left:
            self._end_session(job, None)

    def _start(
        self, body: Body, prompt: Prompt, requests: Sequence[TextRequest], loop: asyncio.AbstractEventLoop
    ) -> GenerationJob:
        job = GenerationJob(body, [self._engine.add(request) for request in requests], prompt, loop)
        self._jobs |= {text: (job, choice) for choice, text in enumerate(job.texts)}
        return job

    def _read(
        self, body: Body, session: sessions.Session | None, opened: OpenedModel
    ) -> tuple[list[Prompt], list[TextRequest]]:
        """The prompts of a request, and its texts; on a reader's thread, with its `opened`."""
        if isinstance(body, ChatBody):
            prompts = [_conversation(opened, body.conversation(), session)]
        else:
            assert isinstance(body, CompletionBody)
            if session is not None and session.messages is not None:
                raise Refusal("the session is a conversation; use /v1/chat/completions", param="session")
            previous = None if session is None else session.state
            prompts = [Prompt(_tokens(opened, prompt, previous), previous) for prompt in body.prompts]
            if body.echo:
                texts = [
                    prompt if isinstance(prompt, str) else opened.tokenizer.decode(prompt)
                    for prompt in body.prompts
                ]
                prompts = [prompt._replace(echo=text) for prompt, text in zip(prompts, texts)]
        return prompts, self._requests(body, prompts)

    def _requests(self, body: Body, prompts: Sequence[Prompt]) -> list[TextRequest]:
        samples = body.n or 1
        if body.session is not None and (samples > 1 or len(prompts) > 1):
            raise Refusal("session keeps one text; send one prompt and leave n out", param="session")
        if samples * len(prompts) > 16 * self._batch_size:
            raise Refusal(
                f"prompt: {len(prompts)} prompts of n={samples} are too many for one request; send "
                f"{16 * self._batch_size} texts at most",
                param="prompt",
            )
        default = self._max_new_tokens if isinstance(body, ChatBody) else COMPLETION_TOKENS
        most = min(default, self._max_new_tokens) if body.max_new_tokens is None else body.max_new_tokens
        if most > self._max_new_tokens:
            raise Refusal(
                f"max_tokens={most} exceeds this server's limit; give at most {self._max_new_tokens}"
            )
        seed = secrets.randbits(63) if body.seed is None else body.seed
        keeps = body.session is not None
        limit = position_limit(self.opened.config)
        requests = []
        for prompt in prompts:
            read = len(prompt.tokens) + (prompt.previous.tokens if prompt.previous else 0)
            new = most
            if body.max_new_tokens is None and limit is not None:
                new = max(1, min(most, limit - read))
            check_positions(self.opened.config, read, new, "max_tokens")
            first = TextRequest(prompt.tokens, new, body.sampling(), seed, stop=body.stops, ends=self._ends)
            first = replace(first, logprobs=body.num_top_tokens, echo=prompt.echo)
            first = replace(first, previous=prompt.previous, keeps_state=keeps)
            requests += [replace(first, sample=sample) for sample in range(samples)]
        return requests


def _tokens(opened: OpenedModel, prompt: str | list[int], previous: TextState | None) -> list[int]:
    tokenizer = opened.tokenizer
    if isinstance(prompt, str) and previous is None:
        return prompt_tokens(opened, prompt)
    if isinstance(prompt, str):
        check_text(prompt)
        prompt = tokenizer.encode(prompt)
    elif not all(0 <= token < tokenizer.vocab_size for token in prompt):
        raise Refusal(f"prompt: tokens are from 0 to {tokenizer.vocab_size - 1}", param="prompt")
    if not prompt and not (previous and previous.unread):
        raise Refusal("prompt is empty, and there is nothing to continue; give a text", param="prompt")
    return prompt


def _conversation(opened: OpenedModel, messages: list[Message], session: sessions.Session | None) -> Prompt:
    """The prompt of a chat; a session reads only new messages, whether or not the client repeats earlier ones."""
    if session is None:
        return Prompt(prompt_tokens(opened, messages), messages=messages)
    history = session.messages
    if history is None:
        raise Refusal("the session is not a conversation; use /v1/completions", param="session")
    new_messages = messages[len(history) :] if messages[: len(history)] == history else messages
    if not new_messages:
        raise Refusal("messages has nothing after the last answer; add a message", param="messages")
    for message in new_messages:
        check_text(message["content"])
    whole = [*history, *new_messages]
    new_tokens = ChatTemplate(opened.tokenizer).tokens_after(history, new_messages)
    # None if the template renders an earlier answer differently now, such as without its reasoning.
    if new_tokens is None:
        return Prompt(prompt_tokens(opened, whole), messages=whole)
    return Prompt(new_tokens, session.state, whole)


def _stopped_error() -> RunFailed:
    return RunFailed("the server stops")

"""The thread that owns the model: requests come in through a queue, and pieces of text go out to their tasks."""

import asyncio
import logging
import queue
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from data_pipeline.chat import ChatTemplate, Message
from megakernel.checkpoint.opened import OpenedModel
from megakernel.config import RunFailed

from ..engine import Behind, Chosen, Engine, Finish, Request, Step, Text, check_positions, most_tokens
from ..run import check_text, prompt_tokens
from . import sessions
from .protocol import Body, ChatBody, CompletionBody, Refusal

_log = logging.getLogger(__name__)
T = TypeVar("T")

COMPLETION_TOKENS = 16
"""New tokens of a completion that does not say how many, as OpenAI has it."""


class Prompt(NamedTuple):
    """What is to be read for a request."""

    tokens: list[int]
    behind: Behind | None = None
    messages: list[Message] | None = None
    """The whole conversation."""


class Piece(NamedTuple):
    """What a step added to one of a request's texts."""

    choice: int
    text: str
    chosen: Chosen | None
    finish: Finish | None


@dataclass(eq=False)
class Job:
    """The texts of one request under way."""

    body: Body
    texts: list[Text]
    prompt: Prompt
    """The last of its prompts: with a session there is one."""

    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[Piece | Exception] = field(default_factory=asyncio.Queue)
    said: str = ""
    """Of the only text, where a session is kept."""

    async def read(self) -> AsyncIterator[Piece]:
        """All pieces as they come. Raises RunFailed where the server cannot go on."""
        going = len(self.texts)
        while going:
            piece = await self.pieces.get()
            if isinstance(piece, Exception):
                raise piece
            going -= piece.finish is not None
            yield piece

    def tell(self, piece: Piece | Exception) -> None:
        """From the model's thread."""
        with suppress(RuntimeError):  # its loop has ended, and so has whoever listened
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    @property
    def usage(self) -> dict[str, object]:
        """As OpenAI counts: what a session has read before is of the prompt, and cached."""
        cached = self.prompt.behind.tokens if self.prompt.behind else 0
        per_prompt = self.texts[:: self.body.n or 1]
        prompt = cached + sum(len(text.request.tokens) for text in per_prompt)
        new = sum(len(text.new_tokens) for text in self.texts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class Worker:
    """Runs the engine. Its thread alone touches model, tokenizer and sessions, so that nothing needs a lock."""

    def __init__(self, opened: OpenedModel, *, batch_size: int, most_sessions: int, most_tokens: int):
        """Reads the weights. most_tokens: new ones of a text at most."""
        self.opened, self.tokenizer = opened, opened.tokenizer
        self._batch_size, self._most_tokens = batch_size, most_tokens
        self._model, _ = opened.load()
        self._ends = opened.ends
        self._engine = self._new_engine()
        self._jobs: dict[Text, tuple[Job, int]] = {}
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.sessions = sessions.Sessions(most_sessions)
        self.fingerprint = sessions.fingerprint(opened, self._model)
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all texts where they are, and the thread."""
        self._inbox.put(None)

    @property
    def health(self) -> dict[str, object]:
        """Texts under way, and whether there is somebody at work."""
        return {
            "status": "ok" if self._thread.is_alive() else "stopped",
            "running": self._engine.running,
            "waiting": self._engine.waiting,
            "sessions": len(self.sessions),
        }

    async def call(self, function: Callable[[], T]) -> T:
        """What a function returns that runs on the model's thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(run)
        if not self._thread.is_alive():
            raise _stops()
        return await asyncio.shield(asyncio.wrap_future(future))

    async def submit(self, body: Body) -> Job:
        """Begin what a request asks for. Raises UserError where it cannot be."""
        loop = asyncio.get_running_loop()
        return await self.call(lambda: self._submit(body, loop))

    def remove(self, job: Job) -> None:
        """Forget a request, wherever its texts stand; nothing where they have ended."""
        self._inbox.put(lambda: self._remove(job))

    def restore(self, name: str, data: bytes) -> sessions.Session:
        """The session of a file, kept under a name. For `call`: it reads a token with the model."""
        session = sessions.from_file(data, self._engine, self.opened, self.fingerprint)
        self.sessions.keep(name, session)
        return session

    def _new_engine(self) -> Engine:
        isolate = self.opened.config.data.isolate_documents
        return Engine(self._model, self.tokenizer, isolate_documents=isolate, max_batch=self._batch_size)

    def _work(self) -> None:
        while True:
            busy = bool(self._jobs)
            with suppress(queue.Empty):
                while True:
                    task = self._inbox.get(block=not busy)
                    if task is None:
                        self._fail(_stops())
                        return
                    task()
                    busy = True
            if not self._jobs:
                continue
            try:
                for step in self._engine.step():
                    self._took(step)
            except Exception as error:
                # Whatever it was, the batch is in no known state; the model is.
                _log.exception("a step of the model failed")
                self._fail(RunFailed(f"a step of the model failed ({type(error).__name__}: {error})"))
                self._engine = self._new_engine()

    def _fail(self, error: Exception) -> None:
        for job in {job for job, _ in self._jobs.values()}:
            job.tell(error)
            self._end_session(job, None)
        self._jobs.clear()

    def _took(self, step: Step) -> None:
        job, choice = self._jobs[step.text]
        if job.body.session is not None:
            job.said += step.piece
        if step.text.finish is not None:
            del self._jobs[step.text]
            self._end_session(job, step.text)
        job.tell(Piece(choice, step.piece, step.chosen, step.text.finish))

    def _end_session(self, job: Job, text: Text | None) -> None:
        name = job.body.session
        if name is None:
            return
        session = None
        if text is not None:
            assert text.behind is not None
            messages = job.prompt.messages
            if messages is not None:
                messages = [*messages, {"role": "assistant", "content": job.said}]
            session = sessions.Session(text.behind, messages)
        self.sessions.end(name, session)

    def _remove(self, job: Job) -> None:
        left = [text for text in job.texts if text in self._jobs]
        for text in left:
            self._engine.remove(text)
            del self._jobs[text]
        if left:
            self._end_session(job, None)

    def _submit(self, body: Body, loop: asyncio.AbstractEventLoop) -> Job:
        name = body.session
        before = None if name is None else self.sessions.begin(name)
        try:
            prompts = self._prompts(body, before)
            requests = self._requests(body, prompts)
        except Exception:
            if name is not None:
                self.sessions.end(name, None)
            raise
        job = Job(body, [self._engine.add(request) for request in requests], prompts[-1], loop)
        self._jobs |= {text: (job, choice) for choice, text in enumerate(job.texts)}
        return job

    def _prompts(self, body: Body, before: sessions.Session | None) -> list[Prompt]:
        if isinstance(body, ChatBody):
            return [self._conversation(body.conversation(), before)]
        assert isinstance(body, CompletionBody)
        prompts = body.prompts
        if before is not None and before.messages is not None:
            raise Refusal("the session is a conversation; go on with /v1/chat/completions", param="session")
        behind = None if before is None else before.behind
        return [Prompt(self._tokens(prompt, behind), behind) for prompt in prompts]

    def _tokens(self, prompt: str | list[int], before: Behind | None) -> list[int]:
        if isinstance(prompt, str) and before is None:
            return prompt_tokens(self.opened, prompt)
        if isinstance(prompt, str):
            check_text(prompt)
            prompt = self.tokenizer.encode(prompt)
        elif not all(0 <= token < self.tokenizer.vocab_size for token in prompt):
            raise Refusal(f"prompt: tokens are from 0 to {self.tokenizer.vocab_size - 1}", param="prompt")
        if not prompt and not (before and before.unread):
            raise Refusal("prompt is empty, and there is nothing to go on from; give a text", param="prompt")
        return prompt

    def _conversation(self, messages: list[Message], before: sessions.Session | None) -> Prompt:
        """Of a session the new messages alone are read, be they sent alone or behind all others."""
        if before is None:
            return Prompt(prompt_tokens(self.opened, messages), messages=messages)
        heard = before.messages
        if heard is None:
            raise Refusal("the session is no conversation; go on with /v1/completions", param="session")
        more = messages[len(heard) :] if messages[: len(heard)] == heard else messages
        if not more:
            raise Refusal("messages has nothing behind the last answer; add a message", param="messages")
        for message in more:
            check_text(message["content"])
        whole = [*heard, *more]
        following = ChatTemplate(self.tokenizer).following(heard, more)
        if (
            following is None
        ):  # the template writes an earlier answer in another way, such as without its thoughts
            return Prompt(prompt_tokens(self.opened, whole), messages=whole)
        return Prompt(following, before.behind, whole)

    def _requests(self, body: Body, prompts: Sequence[Prompt]) -> list[Request]:
        samples = body.n or 1
        if body.session is not None and (samples > 1 or len(prompts) > 1):
            raise Refusal("session keeps one text; send one prompt and leave n out", param="session")
        if samples * len(prompts) > 16 * self._batch_size:
            raise Refusal(
                f"prompt: {len(prompts)} prompts of n={samples} are too many for one request; send "
                f"{16 * self._batch_size // samples} at most",
                param="prompt",
            )
        default = self._most_tokens if isinstance(body, ChatBody) else COMPLETION_TOKENS
        new = body.limit or min(default, self._most_tokens)
        if new > self._most_tokens:
            raise Refusal(
                f"max_tokens={new} is more than this server makes; give at most {self._most_tokens}"
            )
        seed = secrets.randbits(63) if body.seed is None else body.seed
        requests = []
        for prompt in prompts:
            read = len(prompt.tokens) + (prompt.behind.tokens if prompt.behind else 0)
            room = most_tokens(self.opened.config)
            if body.limit is None and room is not None:
                new = max(1, min(new, room - read))
            check_positions(self.opened.config, read, new, "max_tokens")
            requests += [
                Request(
                    prompt.tokens,
                    new,
                    body.sampling(),
                    seed,
                    sample,
                    body.stops,
                    self._ends,
                    body.likeliest,
                    prompt.behind,
                    keeps_state=body.session is not None,
                )
                for sample in range(samples)
            ]
        return requests


def _stops() -> RunFailed:
    return RunFailed("the server stops")

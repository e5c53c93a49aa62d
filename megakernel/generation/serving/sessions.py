"""Sessions: states of texts and conversations, kept in memory or as safetensors files, which cannot run code."""

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from data_pipeline.chat import Message, check_messages
from megakernel.checkpoint.opened import OpenedModel
from megakernel.config import UserError

from .. import states
from ..engine import GenerationEngine, TextState, check_positions
from ..text import CONTEXT
from .protocol import Refusal

if TYPE_CHECKING:
    from megakernel.model import LanguageModel

_KEY, _FORMAT = "session", "megakernel session 1"
"""Metadata key of a session's file, whose JSON holds everything but tensors, and the format that it names."""

_MAX_EVICTED = 100_000
"""Names of evicted sessions to remember, so that continuing one is an error and not a new conversation."""


@dataclass(frozen=True)
class Session:
    """The state of a text that can be continued."""

    state: TextState
    messages: list[Message] | None
    """The conversation including its last answer; None for a text."""

    used: float = field(default_factory=time.time)
    tokens_per_second: float | None = None
    """Of the last answer, after its first token; None for a state from a file, and after one token."""

    @property
    def size(self) -> int:
        """Bytes of its state."""
        return states.state_bytes(self.state.decoder.states)

    @property
    def tokens_read(self) -> int:
        """Tokens that its state is of: the last one of an answer is read with what follows it."""
        return self.state.tokens - len(self.state.unread)


class Sessions:
    """The most recently used sessions, by name."""

    def __init__(self, max_sessions: int):
        """max_sessions: further ones evict the least recently used."""
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._evicted: OrderedDict[str, None] = OrderedDict()
        self._in_use: set[str] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    def items(self) -> list[tuple[str, Session]]:
        """All sessions by name, least recently used first."""
        return list(self._sessions.items())

    def acquire(self, name: str) -> Session | None:
        """The session to continue, None for a new one; it is locked until `release`."""
        self._check_idle(name)
        if name in self._evicted:
            raise Refusal(
                f"session {name} was forgotten, as {self._max_sessions} others were used since (--sessions); "
                "restore its state, or DELETE it to begin anew",
                status=404,
                param="session",
                code="session_forgotten",
            )
        self._in_use.add(name)
        return self._sessions.get(name)

    def release(self, name: str, session: Session | None) -> None:
        """Unlock a session and store its new state; None: keep the old one."""
        self._in_use.discard(name)
        if session is not None:
            self.store(name, session)

    def store(self, name: str, session: Session) -> None:
        """Store a session in place of any of this name."""
        self._check_idle(name)
        self._evicted.pop(name, None)
        self._sessions[name] = session
        self._sessions.move_to_end(name)
        while len(self._sessions) > self._max_sessions:
            oldest, _ = self._sessions.popitem(last=False)
            self._evicted[oldest] = None
        while len(self._evicted) > _MAX_EVICTED:
            self._evicted.popitem(last=False)

    def find(self, name: str) -> Session:
        """The session of this name. Raises Refusal if there is none."""
        if name not in self._sessions:
            raise Refusal(
                f"there is no session {name}", status=404, param="session", code="session_not_found"
            )
        return self._sessions[name]

    def delete(self, name: str) -> None:
        """Delete a session for good: a request with this name begins a new one."""
        self._check_idle(name)
        if name in self._evicted:
            del self._evicted[name]
            return
        self.find(name)
        del self._sessions[name]

    def _check_idle(self, name: str) -> None:
        if name in self._in_use:
            raise Refusal(
                f"session {name} is answering another request; wait for its end",
                status=409,
                param="session",
                code="session_busy",
            )


def fingerprint(opened: OpenedModel, model: "LanguageModel") -> str:
    """SHA-256 of the model's configuration, its tokenizer, and a sample of all its weights."""
    digest = hashlib.sha256(opened.tokenizer.hash.encode())
    digest.update(opened.config.model.model_dump_json().encode())
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        sample = tensor.detach().flatten()[:: max(1, tensor.numel() // 4096)].contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample.cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def to_file(session: Session, model: str) -> bytes:
    """The session as a safetensors file, deterministic. model: the model's fingerprint."""
    from safetensors.torch import save

    state = session.state
    tensors = {name: x.detach().cpu().contiguous() for name, x in states.named_tensors(state.decoder.states)}
    tensors["seen"] = torch.tensor(sorted(state.seen), dtype=torch.int32)
    metadata = {
        "format": _FORMAT,
        "model": model,
        "position": state.decoder.positions[0],
        "tokens": state.tokens,
        "context": state.context,
        "unread": state.unread,
        "messages": session.messages,
    }
    metadata["sha256"] = _digest(metadata, save(tensors))
    return save(tensors, {_KEY: json.dumps(metadata)})


class Content(NamedTuple):
    """What a session's file holds, before its tensors are compared with the model's."""

    tensors: Mapping[str, Tensor]
    position: int
    tokens: int
    context: list[int]
    unread: list[int]
    seen: frozenset[int]
    messages: list[Message] | None


def from_file(data: bytes, engine: GenerationEngine, opened: OpenedModel, model: str) -> Session:
    """The session of a file. Raises Refusal for a damaged one, and for one of another model (by fingerprint)."""
    return restored(read_file(data, opened, model), engine)


def read_file(data: bytes, opened: OpenedModel, model: str) -> Content:
    """The content of a session's file; does not run the model. Raises Refusal as `from_file` does."""
    from safetensors import SafetensorError
    from safetensors.torch import load, save

    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = json.loads(header.get("__metadata__", {}).get(_KEY, "{}"))
        digest = metadata.pop("sha256", None)
    except (SafetensorError, ValueError, RecursionError, AttributeError):
        raise _invalid_state("it is damaged, or not a safetensors file") from None
    if metadata.get("format") != _FORMAT:
        raise _invalid_state("it is not a session file")
    if metadata.get("model") != model:
        raise _invalid_state("it is of another model than the one served here")
    if digest != _digest(metadata, save(tensors)):
        raise _invalid_state("it is damaged: its SHA-256 does not match its content")
    with _untrusted():
        return _content(tensors, metadata, opened)


def restored(content: Content, engine: GenerationEngine) -> Session:
    """The session of a file's content; runs the model. Raises Refusal if the tensors do not fit it."""
    with _untrusted():
        fresh = engine.new_decoder()
        fresh.read([[engine.tokenizer.eod]])
        on_device = {}
        for name, like in states.named_tensors(fresh.states):
            _check_like(content.tensors[name], like)
            on_device[name] = content.tensors[name].to(like.device)
        if unknown := content.tensors.keys() - on_device.keys() - {"seen"}:
            raise _unfit(f"it has tensors that the model's state does not: {', '.join(sorted(unknown)[:3])}")
        decoder = engine.new_decoder()
        decoder.states = states.with_tensors(fresh.states, on_device)
        decoder.positions = [content.position]
        # Try the state alone, before it could fail a batch with other texts.
        if not bool(decoder.extract(0).read([[*content.unread, engine.tokenizer.eod]]).isfinite().all()):
            raise ValueError("not finite")
        _, _, tokens, context, unread, seen, messages = content
        return Session(TextState(decoder, context, unread, tokens, seen), messages)


@contextmanager
def _untrusted() -> Iterator[None]:
    """Refuse a file for whatever its content makes the block raise: it can be anything."""
    try:
        yield
    except Refusal:
        raise
    except (RuntimeError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise _invalid_state(f"its content does not fit the model ({type(error).__name__})") from None


def _content(tensors: Mapping[str, Tensor], metadata: dict[str, Any], opened: OpenedModel) -> Content:
    vocab_size = opened.tokenizer.vocab_size
    position, tokens = (_count(metadata, key) for key in ("position", "tokens"))
    context, unread = (_ids(metadata[key], vocab_size) for key in ("context", "unread"))
    if len(unread) > 1:  # a text ends with at most its last token unread
        raise _unfit(f"it has {len(unread):,} unread tokens, and an ended text has at most one")
    check_positions(opened.config, position + len(unread), 1, "tokens")
    if position + len(unread) > tokens or len(context) > CONTEXT:
        raise _unfit(
            f"after {tokens:,} tokens it has the position {position:,} and {len(context):,} last tokens"
        )
    if tensors["seen"].numel() > vocab_size:
        raise ValueError("seen")
    seen = frozenset(_ids(tensors["seen"].tolist(), vocab_size))
    if (messages := metadata["messages"]) is not None:
        check_messages(messages, "messages")
    return Content(tensors, position, tokens, context, unread, seen, messages)


_MAX_TOKENS = 2**31
"""More tokens than any text has: at 1,000 tokens a second it takes 25 days."""


def _count(metadata: dict[str, Any], key: str) -> int:
    value = metadata[key]
    if type(value) is not int or not 0 <= value < _MAX_TOKENS:
        raise _unfit(f"{key}={value!r:.40} is not an integer from 0 to {_MAX_TOKENS - 1:,}")
    return value


def _check_like(x: Tensor, like: Tensor) -> None:
    """ValueError unless dtype and shape agree; dimensions that grow with the text (1 in `like`) may differ."""
    same = [a == b or (at > 0 and b == 1) for at, (a, b) in enumerate(zip(x.shape, like.shape))]
    if x.dtype != like.dtype or x.dim() != like.dim() or not all(same):
        raise ValueError("shape")


def _ids(values: Any, vocab_size: int) -> list[int]:
    if not all(type(token) is int and 0 <= token < vocab_size for token in values):
        raise ValueError("tokens")
    return list(values)


def _digest(metadata: Mapping[str, Any], tensors: bytes) -> str:
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode() + tensors).hexdigest()


def _unfit(reason: str) -> UserError:
    return _invalid_state(f"its content does not fit the model (ValueError), as {reason}")


def _invalid_state(reason: str) -> UserError:
    return Refusal(f"the state cannot be used: {reason}; send one that GET returned", code="invalid_state")

"""Sessions: where a text or a conversation stands, kept in memory, and as a file of tensors that nothing runs."""

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from data_pipeline.chat import Message, check_messages
from megakernel.checkpoint.opened import OpenedModel
from megakernel.config import UserError

from .. import states
from ..engine import Behind, Engine, check_positions
from .protocol import Refusal

if TYPE_CHECKING:
    from megakernel.model import LanguageModel

_KEY, _FORMAT = "session", "megakernel session 1"
"""Of the metadata: where what is no tensor stands, as JSON, and what it begins with."""

_REMEMBERED = 100_000
"""Names of forgotten sessions: whoever goes on with one is told, and does not get another conversation."""


@dataclass(frozen=True)
class Session:
    """Where a text stands that can be gone on from."""

    behind: Behind
    messages: list[Message] | None
    """The conversation with its last answer; None of a text."""

    used: float = field(default_factory=time.time)

    @property
    def size(self) -> int:
        """Bytes of its state."""
        return sum(x.nbytes for _, x in states.named(self.behind.decoder.states))


class Sessions:
    """The sessions used last, by name."""

    def __init__(self, most: int):
        """most: sessions at once; more push out the one that was not used for longest."""
        self._most = most
        self._kept: OrderedDict[str, Session] = OrderedDict()
        self._forgotten: OrderedDict[str, None] = OrderedDict()
        self._answering: set[str] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def items(self) -> list[tuple[str, Session]]:
        """The last used last."""
        return list(self._kept.items())

    def begin(self, name: str) -> Session | None:
        """The session to go on with, None for a new one; nobody else may until `end`."""
        self._check_idle(name)
        if name in self._forgotten:
            raise Refusal(
                f"session {name} was forgotten, as {self._most} others were used since (--sessions); restore its "
                "state, or DELETE it to begin anew",
                status=404,
                param="session",
                code="session_forgotten",
            )
        self._answering.add(name)
        return self._kept.get(name)

    def end(self, name: str, session: Session | None) -> None:
        """Keep where it stands now; None: where it stood."""
        self._answering.discard(name)
        if session is not None:
            self.keep(name, session)

    def keep(self, name: str, session: Session) -> None:
        """In place of what had this name."""
        self._check_idle(name)
        self._forgotten.pop(name, None)
        self._kept[name] = session
        self._kept.move_to_end(name)
        while len(self._kept) > self._most:
            oldest, _ = self._kept.popitem(last=False)
            self._forgotten[oldest] = None
        while len(self._forgotten) > _REMEMBERED:
            self._forgotten.popitem(last=False)

    def find(self, name: str) -> Session:
        """Refusal where there is none."""
        if name not in self._kept:
            raise Refusal(
                f"there is no session {name}", status=404, param="session", code="session_not_found"
            )
        return self._kept[name]

    def forget(self, name: str) -> None:
        """For good: a request with this name begins a new one."""
        self._check_idle(name)
        if name in self._forgotten:
            del self._forgotten[name]
            return
        self.find(name)
        del self._kept[name]

    def _check_idle(self, name: str) -> None:
        if name in self._answering:
            raise Refusal(
                f"session {name} is answering another request; wait for its end",
                status=409,
                param="session",
                code="session_busy",
            )


def fingerprint(opened: OpenedModel, model: "LanguageModel") -> str:
    """Of the model's configuration and tokenizer, and of numbers from all over its weights."""
    digest = hashlib.sha256(opened.tokenizer.hash.encode())
    digest.update(opened.config.model.model_dump_json().encode())
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        some = tensor.detach().flatten()[:: max(1, tensor.numel() // 4096)].contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(some.cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def to_file(session: Session, model: str) -> bytes:
    """A safetensors file, the same for the same session. model: its fingerprint."""
    from safetensors.torch import save

    behind = session.behind
    tensors = {name: x.detach().cpu().contiguous() for name, x in states.named(behind.decoder.states)}
    tensors["seen"] = torch.tensor(sorted(behind.seen), dtype=torch.int32)
    told = {
        "format": _FORMAT,
        "model": model,
        "position": behind.decoder.positions[0],
        "tokens": behind.tokens,
        "context": behind.context,
        "unread": behind.unread,
        "messages": session.messages,
    }
    told["sha256"] = _digest(told, save(tensors))
    return save(tensors, {_KEY: json.dumps(told)})


def from_file(data: bytes, engine: Engine, opened: OpenedModel, model: str) -> Session:
    """The session of a file. Raises Refusal for a damaged one, and for another model's than that fingerprint."""
    from safetensors import SafetensorError
    from safetensors.torch import load, save

    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        told = json.loads(header.get("__metadata__", {}).get(_KEY, "{}"))
        digest = told.pop("sha256", None)
    except (SafetensorError, ValueError, RecursionError, AttributeError):
        raise _unusable("it is no safetensors file, or damaged") from None
    if told.get("format") != _FORMAT:
        raise _unusable("it is no session's")
    if told.get("model") != model:
        raise _unusable("it is of another model than the one served here")
    if digest != _digest(told, save(tensors)):
        raise _unusable("it is damaged: its content has another SHA-256 than it says")
    try:
        return _restored(tensors, told, engine, opened)
    # Whoever has written it can have meant anything.
    except (RuntimeError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise _unusable(f"its content does not fit the model ({type(error).__name__})") from None


def _restored(
    tensors: Mapping[str, Tensor], told: dict[str, Any], engine: Engine, opened: OpenedModel
) -> Session:
    fresh = engine.new_decoder()
    fresh.read([[engine.tokenizer.eod]])
    on_device = {}
    for name, like in states.named(fresh.states):
        _check_like(tensors[name], like)
        on_device[name] = tensors[name].to(like.device)
    decoder = engine.new_decoder()
    decoder.states = states.filled(fresh.states, on_device)
    context, unread = _ids(told["context"], engine), _ids(told["unread"], engine)
    seen = frozenset(_ids(tensors["seen"].tolist(), engine))
    position, tokens, messages = int(told["position"]), int(told["tokens"]), told["messages"]
    if not 0 <= position <= tokens < 2**40:
        raise ValueError("position")
    check_positions(opened.config, position + len(unread), 1, "tokens")
    decoder.positions = [position]
    if messages is not None:
        check_messages(messages, "messages")
    # Tried here, where nobody else's text is in the batch.
    if not bool(decoder.alone(0).read([[*unread, engine.tokenizer.eod]]).isfinite().all()):
        raise ValueError("not finite")
    return Session(Behind(decoder, context, unread, tokens, seen), messages)


def _check_like(x: Tensor, like: Tensor) -> None:
    """Of the same dtype and shape, but for what has a number for each token: that is 1 behind the first."""
    same = [a == b or (at > 0 and b == 1) for at, (a, b) in enumerate(zip(x.shape, like.shape))]
    if x.dtype != like.dtype or x.dim() != like.dim() or not all(same):
        raise ValueError("shape")


def _ids(given: Any, engine: Engine) -> list[int]:
    if not all(type(token) is int and 0 <= token < engine.tokenizer.vocab_size for token in given):
        raise ValueError("tokens")
    return list(given)


def _digest(told: Mapping[str, Any], tensors: bytes) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode() + tensors).hexdigest()


def _unusable(reason: str) -> UserError:
    return Refusal(f"the state cannot be used: {reason}; send one that GET gave", code="invalid_state")

"""OpenAI's protocol: request bodies, and errors."""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from data_pipeline.chat import Message, check_messages
from megakernel.config import UserError

from ..sampling import Sampling

MAX_CHOICES = 128
"""Maximum of `n`, the texts of one request."""

MAX_STOPS = 16
"""Maximum number of stop strings of a request."""

SESSION_NAME, MAX_SESSION_NAME = r"^[.]*[A-Za-z0-9_-][A-Za-z0-9_.-]*$", 64
"""What names of sessions match, and their maximum length. `.` and `..` are none: paths drop them."""

_IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
}
"""Fields that do not affect the text."""

_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
}
"""Unsupported OpenAI fields -> their neutral values, which are accepted."""


class Refusal(UserError):
    """A rejected request: status 4xx and the reason."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _unknown_field(parent: str, name: str, known: Iterable[str], of_what: str) -> Refusal:
    """The refusal of a field, with the known ones that are similar to it, if any."""
    # Comparing takes time in the square of the name's length.
    similar = difflib.get_close_matches(name, known) if len(name) <= _LONGEST_FIELD else []
    shown = name if len(name) <= _LONGEST_FIELD else f"{name[:_LONGEST_FIELD]}..."
    path = f"{parent}.{shown}" if parent else shown
    remedy = f"write {', '.join(similar)}" if similar else "leave it out"
    return Refusal(f"{path} is not a field {of_what}".rstrip() + f"; {remedy}", param=parent or shown)


_LONGEST_FIELD = 64


class _FirstError(FailFast):
    """Stops at a list's first wrong item: errors of a million items take minutes. Hashable, as types must be."""

    __hash__ = object.__hash__


class StreamOptions(BaseModel):
    """What a stream contains besides the text."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool = False
    include_obfuscation: bool = False


class Body(BaseModel):
    """The fields of both kinds of requests. None means the default, as if the field were left out."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=1, le=2**31 - 1)
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | Annotated[list[str], _FirstError()] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session: str | None = Field(None, pattern=SESSION_NAME, max_length=MAX_SESSION_NAME)

    @model_validator(mode="after")
    def _check_extra_fields(self) -> "Body":
        for name, value in (self.model_extra or {}).items():
            if name in _IGNORED or value is None or value in _UNSUPPORTED.get(name, ()):
                continue
            if name in _UNSUPPORTED:
                raise Refusal(f"{name} is not supported by this server; leave it out", param=name)
            raise _unknown_field("", name, type(self).model_fields, "of this request")
        for name in (self.stream_options and self.stream_options.model_extra) or ():
            raise _unknown_field("stream_options", name, StreamOptions.model_fields, "")
        return self

    def sampling(self) -> Sampling:
        """How tokens are drawn. Raises UserError for invalid values."""
        settings = {name: getattr(self, name) for name in Sampling.__dataclass_fields__}
        return Sampling(**{name: value for name, value in settings.items() if value is not None})

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings before which a text ends."""
        strings = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in strings or len(strings) > MAX_STOPS:
            raise Refusal(f"stop: give up to {MAX_STOPS} texts, none of them empty", param="stop")
        return tuple(strings)

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum number of new tokens, if the request sets it."""
        return self.max_tokens

    @property
    def num_top_tokens(self) -> int | None:
        """Number of most likely tokens to report with the chosen one's log-probability; None: report nothing."""
        raise NotImplementedError


def _kind_of_prompt(prompt: Any) -> str:
    """Which of its types a prompt is checked as: trying each takes minutes for a list of a million tokens."""
    if not isinstance(prompt, list):
        return "str"
    first = prompt[0] if prompt else ""
    if isinstance(first, list):
        return "list[list[int]]"
    return "list[str]" if isinstance(first, str) else "list[int]"


_Tokens = Annotated[list[int], _FirstError()]
_Prompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[list[str], _FirstError(), Tag("list[str]")]
    | Annotated[_Tokens, Tag("list[int]")]
    | Annotated[list[_Tokens], _FirstError(), Tag("list[list[int]]")],
    Discriminator(_kind_of_prompt),
]


class CompletionBody(Body):
    """The body of /v1/completions: texts to continue, or their tokens."""

    prompt: _Prompt
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None

    @model_validator(mode="after")
    def _check_echo(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            message = "max_tokens=0 adds nothing; give 1 or more, or echo=true for the prompt itself"
            raise Refusal(message, param="max_tokens")
        if self.echo and self.session is not None:
            message = (
                "echo repeats a whole text, and a session has only what follows it; leave out one of them"
            )
            raise Refusal(message, param="echo")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, at least one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise Refusal("prompt is an empty list; give a text", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def num_top_tokens(self) -> int | None:
        """The value of `logprobs`."""
        return self.logprobs


class ChatBody(Body):
    """The body of /v1/chat/completions: a conversation to answer."""

    messages: Annotated[list[dict[str, Any]], _FirstError()]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise Refusal(
                f"top_logprobs={self.top_logprobs} has no effect alone; add logprobs=true",
                param="top_logprobs",
            )
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum number of new tokens, under its new name or the old one."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top_tokens(self) -> int | None:
        """The value of `top_logprobs`, if `logprobs` is set."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> list[Message]:
        """The messages with their contents as text, without null values. Raises Refusal for invalid ones."""
        plain = [
            {
                **{key: value for key, value in message.items() if value is not None},
                "content": _text(message.get("content")),
            }
            for message in self.messages
        ]
        try:
            return list(check_messages(plain, "messages"))
        except UserError as error:
            raise Refusal(str(error), param="messages") from None


_AnyBody = TypeVar("_AnyBody", bound=Body)


def parse(kind: type[_AnyBody], data: bytes) -> _AnyBody:
    """The body of a request from its JSON. Raises UserError for an invalid one."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is no JSON ({error}); send a JSON object") from None
    if not isinstance(value, dict):
        raise Refusal("the body: Input should be a valid dictionary; send a JSON object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise invalid(error.errors(include_input=False, include_url=False)[0]) from None


def invalid(error: Mapping[str, Any]) -> UserError:
    """The refusal of the first error that pydantic found."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return cause
    # pydantic adds the type that it tried for a field of several types; leave that out.
    location = [part for part in map(str, error["loc"]) if part != "str" and not part.startswith("list[")]
    message = f"{'.'.join(location) or 'the body'}: {error['msg']}"
    return Refusal(message, param=location[0] if location else None)


def _text(content: Any) -> Any:
    """The text of a message's content, which may be a list of text blocks; None for blocks of another type."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    strings = [text for text in texts if isinstance(text, str)]
    return "\n".join(strings) if len(strings) == len(content) else None

"""What OpenAI's clients send and get: bodies of requests, and errors."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from data_pipeline.chat import Message, check_messages
from megakernel.config import UserError
from megakernel.config.errors import nearest_first

from ..sampling import Sampling

MOST_CHOICES = 128
"""Texts of one request."""

MOST_STOPS = 16
SESSION_NAME = r"^[A-Za-z0-9_.-]{1,64}$"

_IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
}
"""Fields that change no text."""

_WITHOUT: Mapping[str, tuple[Any, ...]] = {
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
"""Fields of OpenAI's that this server does not have -> their values that ask for nothing."""


class Refusal(UserError):
    """A request that cannot be: status 4xx and the reason."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI writes it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    """What a stream tells besides the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Body(BaseModel):
    """What both kinds of requests have. None is a default, as if the field were left out."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=1, le=2**31 - 1)
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session: str | None = Field(None, pattern=SESSION_NAME)

    @model_validator(mode="after")
    def _knows_its_fields(self) -> "Body":
        for name, value in (self.model_extra or {}).items():
            if name in _IGNORED or value is None or value in _WITHOUT.get(name, ()):
                continue
            if name in _WITHOUT:
                raise Refusal(f"{name}: this server does not have it; leave it out", param=name)
            known = nearest_first(name, type(self).model_fields, most=3)
            raise Refusal(f"{name} is no field of this request; write {known}", param=name)
        return self

    def sampling(self) -> Sampling:
        """How tokens are drawn. Raises UserError for values that cannot be."""
        given = {name: getattr(self, name) for name in Sampling.__dataclass_fields__}
        return Sampling(**{name: value for name, value in given.items() if value is not None})

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a text."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in given or len(given) > MOST_STOPS:
            raise Refusal(f"stop: give up to {MOST_STOPS} texts, none of them empty", param="stop")
        return tuple(given)

    @property
    def limit(self) -> int | None:
        """Most new tokens, where the request says."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """Of how many tokens probabilities are told beside the chosen one's; None: of none."""
        raise NotImplementedError


class CompletionBody(Body):
    """Texts to continue, or their tokens."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise Refusal("prompt is an empty list; give a text", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def likeliest(self) -> int | None:
        """As many as `logprobs` says."""
        return self.logprobs


class ChatBody(Body):
    """A conversation to answer."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def limit(self) -> int | None:
        """Under its new name or the old one."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """As many as `top_logprobs` says, where `logprobs` asks for them."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> list[Message]:
        """The messages, whose contents are texts, without keys of no value. Raises Refusal for what is none."""
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


def _text(content: Any) -> Any:
    """Of blocks of text what they say."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    found = [text for text in texts if isinstance(text, str)]
    return "\n".join(found) if len(found) == len(content) else None

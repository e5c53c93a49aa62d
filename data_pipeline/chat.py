"""Conversations as tokens: a tokenizer's own chat template around messages, and which tokens the assistant wrote."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from data_pipeline.document import Document
from data_pipeline.tokenizers import Tokenizer
from megakernel.config.errors import UserError, first_line

Message: TypeAlias = Mapping[str, Any]

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""How a template says which part of it the assistant writes."""


def conversation(messages: Sequence[Any]) -> Document:
    """One row of a column of conversations; keys without a value are left out of its messages.

    Raises UserError for what is no message, and for a role that no template knows.
    """
    found = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise UserError(f"a message is {type(message).__name__}, not {{role, content}}")
        message = {key: value for key, value in message.items() if value is not None}
        if "role" not in message:
            raise UserError(
                f"a message has the keys {', '.join(message)} and no role; write {{role, content}}"
            )
        if message["role"] not in ROLES:
            raise UserError(f"role {message['role']!r} is none of {', '.join(ROLES)}; rename it")
        if not message.keys() & {"content", "tool_calls"}:
            raise UserError(
                f"a message of role {message['role']} has no content; give it, or remove the message"
            )
        found.append(message)
    contents = (_text(message.get("content", "")) for message in found)
    return Document(("\n".join(filter(None, contents)),), messages=tuple(found))


def check_messages(messages: Any, name: str) -> list[dict[str, Any]]:
    """Messages to answer. Raises UserError, naming where they stand, for what is none."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{name} holds no message; write [{{"role": "user", "content": "..."}}]')
    for place, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise UserError(f"{name}[{place}].role={role!r} is unknown; write one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise UserError(f"{name}[{place}].content is no text; write a string")
    return messages


def _text(content: Any) -> str:
    """What is said in a message, whose content may be blocks of text."""
    if isinstance(content, str):
        return content
    return "\n".join(str(block.get("text") or "") for block in content if isinstance(block, Mapping))


class ChatTokens(NamedTuple):
    """A conversation's tokens."""

    tokens: list[int]
    """As the template renders them, and the document's end where they do not end with it."""

    scored: np.ndarray
    """(tokens,) uint8: 1 for what the assistant wrote, with the end of its turn."""


class ChatTemplate:
    """The chat template of a tokenizer.

    What the assistant wrote lies between `{% generation %}` and `{% endgeneration %}`. In a template without these it
    is what a message of the assistant adds to the conversation before it, rendered with the prompt that asks for an
    answer, up to the last end of a document in that.

    Raises UserError for a tokenizer without a template, and for one that does not tell where its tokens lie in a text.
    """

    def __init__(self, tokenizer: Tokenizer):
        if tokenizer.chat_template is None:
            raise UserError(
                "the tokenizer has no chat template; give one with --chat-template FILE, or a tokenizer that has it"
            )
        self._template = tokenizer.chat_template
        self._tokenizer = tokenizer.for_transformers()
        self._eod = tokenizer.eod
        self._is_marked = _MARKED.search(self._template) is not None
        if not self._tokenizer.is_fast:
            raise UserError(
                "the tokenizer does not tell where its tokens lie in a text; give one with a tokenizer.json"
            )

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation that the assistant is to answer. Raises UserError as `encode` does."""
        return self._encode(self._rendered(messages, asks=True)[0])["input_ids"]

    def following(self, heard: Sequence[Message], more: Sequence[Message]) -> list[int] | None:
        """The tokens behind the answer that a conversation ends with, up to where the next one is asked for.

        None where the template writes what was heard in another way once `more` follows. Raises UserError as `encode`.
        """
        before = self._rendered(heard[:-1], asks=True)[0] + heard[-1]["content"]
        whole = self._rendered([*heard, *more], asks=True)[0]
        return self._encode(whole[len(before) :])["input_ids"] if whole.startswith(before) else None

    def encode(self, messages: Sequence[Message]) -> ChatTokens:
        """A conversation. Raises UserError for one that the template refuses, or does not render message by message."""
        whole, marked = self._rendered(messages)
        spans = marked if self._is_marked else list(self._by_prefixes(messages, whole))
        found = self._encode(whole)
        tokens: list[int] = found["input_ids"]
        starts, ends = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        is_end = np.array(tokens) == self._eod
        scored = np.zeros(len(tokens), dtype=np.uint8)
        for start, end in spans:
            (own,) = np.nonzero((starts < end) & (ends > start) & (starts < ends))
            if not self._is_marked and is_end[own].any():
                own = own[: np.flatnonzero(is_end[own])[-1] + 1]  # behind it stands what separates messages
            scored[own] = 1
        if tokens[-1:] == [self._eod]:
            return ChatTokens(tokens, scored)
        # The model has to end its answer with something: this, where the template brings nothing.
        is_answer = messages[-1]["role"] == ASSISTANT
        ends_itself = bool(spans) and bool(is_end[starts >= spans[-1][0]].any())
        return ChatTokens([*tokens, self._eod], np.append(scored, np.uint8(is_answer and not ends_itself)))

    def _encode(self, text: str) -> Any:
        return self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)

    def _rendered(self, messages: Sequence[Message], asks: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The text, and where the template says that the assistant writes. asks: with the prompt for an answer."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self._template,
                return_assistant_tokens_mask=self._is_marked,
                add_generation_prompt=asks,
                **self._tokenizer.special_tokens_map,
            )
        # A template raises what it likes, in Jinja or in Python.
        except Exception as error:
            raise UserError(
                f"the chat template does not take {_beginning(messages)}: {first_line(error)}; correct the "
                "conversation, or give another template with --chat-template FILE"
            ) from error
        return texts[0], spans[0] if spans else []

    def _by_prefixes(self, messages: Sequence[Message], whole: str) -> Iterator[tuple[int, int]]:
        for at, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                before, behind = (
                    self._rendered(messages[:at], asks=True)[0],
                    self._rendered(messages[: at + 1])[0],
                )
                if not (whole.startswith(before) and whole.startswith(behind)):
                    raise UserError(
                        f"the chat template renders message {at + 1} of {_beginning(messages)} in another way where "
                        "others follow, so what the assistant wrote cannot be told from the rest; mark that in the "
                        "template with {% generation %} and {% endgeneration %}, and give it with --chat-template FILE"
                    )
                yield len(before), len(behind)


def _beginning(messages: Sequence[Message]) -> str:
    said = _text(messages[0].get("content", "")) if messages else ""
    return f"the conversation that begins with {said[:40]!r}"

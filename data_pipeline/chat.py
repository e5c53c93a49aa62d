"""Conversations to tokens: rendering with a tokenizer's chat template, and which tokens the assistant wrote."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from data_pipeline.chat_rendering import Unrenderable, render
from data_pipeline.document import Document
from data_pipeline.tokenizers import Tokenizer
from megakernel.config.errors import UserError

Message: TypeAlias = Mapping[str, Any]

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The Jinja tag with which a template marks what the assistant writes."""


def conversation(messages: Sequence[Any]) -> Document:
    """One conversation as a document; message keys with null values are dropped.

    Raises UserError for an invalid message or an unknown role.
    """
    checked = []
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
        if not isinstance(content := message.get("content", ""), str | list):
            raise UserError(f"a message's content is {type(content).__name__}, not text; write a string")
        checked.append(message)
    contents = (_text(message.get("content", "")) for message in checked)
    return Document(("\n".join(filter(None, contents)),), messages=tuple(checked))


def check_messages(messages: Any, name: str) -> list[dict[str, Any]]:
    """The messages, checked. Raises UserError for an invalid one; name: the field that holds them, for errors."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{name} holds no message; write [{{"role": "user", "content": "..."}}]')
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise UserError(f"{name}[{index}].role={role!r:.80} is unknown; write one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise UserError(f"{name}[{index}].content is not a string; write a string")
    return messages


def _text(content: Any) -> str:
    """The text of a message's content, which may be a list of text blocks."""
    if isinstance(content, str):
        return content
    return "\n".join(str(block.get("text") or "") for block in content if isinstance(block, Mapping))


class ChatTokens(NamedTuple):
    """A conversation's tokens."""

    tokens: list[int]
    """The rendered conversation, with the end-of-document token appended unless it ends with it."""

    scored: np.ndarray
    """(tokens,) uint8: 1 for what the assistant wrote, its end-of-turn token included."""


class ChatTemplate:
    """The chat template of a tokenizer.

    The assistant's text lies between `{% generation %}` and `{% endgeneration %}`. Without these tags it is what an
    assistant message adds to the conversation before it (rendered with the generation prompt), up to the last
    end-of-document token in it.

    Raises UserError for a tokenizer without a template or without token offsets.
    """

    def __init__(self, tokenizer: Tokenizer):
        if tokenizer.chat_template is None:
            raise UserError(
                "the tokenizer has no chat template; give one with --chat-template FILE, or a tokenizer that has it"
            )
        self._template = tokenizer.chat_template
        self._tokenizer = tokenizer.for_transformers()
        self._eod = tokenizer.eod
        self._has_tags = _GENERATION_TAG.search(self._template) is not None
        if not self._tokenizer.is_fast:
            raise UserError(
                "the tokenizer has no character offsets of its tokens; give one with a tokenizer.json"
            )

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation with the generation prompt. Raises UserError as `encode` does."""
        return self._ids(self._render(messages, add_generation_prompt=True)[0])

    def tokens_after(self, history: Sequence[Message], new_messages: Sequence[Message]) -> list[int] | None:
        """The tokens that follow the last answer of `history`: the new messages and the generation prompt.

        None if the template renders `history` differently once new messages follow. Raises UserError as `encode` does.
        """
        before = self._render(history[:-1], add_generation_prompt=True)[0] + history[-1]["content"]
        whole = self._render([*history, *new_messages], add_generation_prompt=True)[0]
        return self._ids(whole[len(before) :]) if whole.startswith(before) else None

    def encode(self, messages: Sequence[Message]) -> ChatTokens:
        """A conversation's tokens. Raises UserError if the template rejects it or does not render it incrementally."""
        whole, tagged = self._render(messages)
        spans = tagged if self._has_tags else list(self._spans_from_prefixes(messages, whole))
        encoded = self._encode(whole)
        tokens: list[int] = encoded["input_ids"]
        starts, ends = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        is_end = np.array(tokens) == self._eod
        scored = np.zeros(len(tokens), dtype=np.uint8)
        for start, end in spans:
            (inside,) = np.nonzero((starts < end) & (ends > start) & (starts < ends))
            # Without tags, separators that follow the last end-of-document token are not the assistant's.
            if not self._has_tags and is_end[inside].any():
                inside = inside[: np.flatnonzero(is_end[inside])[-1] + 1]
            scored[inside] = 1
        if tokens[-1:] == [self._eod]:
            return ChatTokens(tokens, scored)
        # The model must learn to end its answer: with this token, if the template writes none.
        is_answer = messages[-1]["role"] == ASSISTANT
        ends_itself = bool(spans) and bool(is_end[starts >= spans[-1][0]].any())
        return ChatTokens([*tokens, self._eod], np.append(scored, np.uint8(is_answer and not ends_itself)))

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _encode(self, text: str) -> Any:
        return self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the spans that the template tags as the assistant's."""
        variables = {"add_generation_prompt": add_generation_prompt, **self._tokenizer.special_tokens_map}
        try:
            return render(self._template, messages, self._has_tags, variables)
        except Unrenderable as error:
            raise UserError(
                f"the chat template rejects {_describe(messages)}: {error}; correct the "
                "conversation, or give another template with --chat-template FILE"
            ) from None

    def _spans_from_prefixes(self, messages: Sequence[Message], whole: str) -> Iterator[tuple[int, int]]:
        for index, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                before, _ = self._render(messages[:index], add_generation_prompt=True)
                after, _ = self._render(messages[: index + 1])
                if not (whole.startswith(before) and whole.startswith(after)):
                    raise UserError(
                        f"the chat template renders message {index + 1} of {_describe(messages)} differently once "
                        "others follow, so the assistant's text cannot be located; mark it in the template with "
                        "{% generation %} and {% endgeneration %}, and give that with --chat-template FILE"
                    )
                yield len(before), len(after)


def _describe(messages: Sequence[Message]) -> str:
    text = _text(messages[0].get("content", "")) if messages else ""
    return f"the conversation that begins with {text[:40]!r}"

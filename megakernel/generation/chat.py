"""Messages as the text that a chat model has learned to continue: its tokenizer's own template."""

from collections.abc import Mapping, Sequence
from typing import Any

from data_pipeline.tokenizers import HuggingFaceTokenizer, Tokenizer
from megakernel.config import UserError
from megakernel.config.errors import first_line

ROLES = ("system", "user", "assistant", "tool", "developer")
"""Whose messages a template may know; it refuses those that it does not."""

Message = Mapping[str, Any]
"""`role` and `content`, both texts."""


def check_template(tokenizer: Tokenizer, source: str) -> None:
    """UserError, naming the model's folder, for a tokenizer without a template."""
    if _template(tokenizer) is None:
        raise UserError(
            f"the tokenizer of {source} has no chat_template, so it knows no messages; give a text to continue, or a "
            "model that was tuned on chats"
        )


def check_messages(messages: Any, name: str) -> list[dict[str, Any]]:
    """The messages of a conversation. Raises UserError, naming where they stand, for what is none."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{name} holds no message; write [{{"role": "user", "content": "..."}}]')
    for place, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise UserError(f"{name}[{place}].role={role!r} is unknown; write one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise UserError(f"{name}[{place}].content is no text; write a string")
    return messages


def rendered(tokenizer: Tokenizer, messages: Sequence[Message], *, answer: bool) -> str:
    """The conversation as text. answer: up to where the assistant's next message begins.

    Raises UserError with the template's own reason for messages that it refuses.
    """
    try:
        text = _wrapped(tokenizer).apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=answer
        )
    # A template is a program of its own: it raises what it likes, and so does its language.
    except Exception as error:
        raise UserError(
            f"the chat template refuses these messages ({first_line(error)}); change them"
        ) from None
    return str(text)


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of rendered text, whose special tokens are spelled out; the template also writes BOS where there is one."""
    return list(_wrapped(tokenizer)(text, add_special_tokens=False)["input_ids"])


def _template(tokenizer: Tokenizer) -> Any:
    return getattr(_wrapped(tokenizer), "chat_template", None)


def _wrapped(tokenizer: Tokenizer) -> Any:
    return tokenizer._tokenizer if isinstance(tokenizer, HuggingFaceTokenizer) else None

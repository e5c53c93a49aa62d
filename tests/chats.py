"""Small tokenizers with chat templates, and conversations."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data_pipeline.tokenizers import byte_level

Message = Mapping[str, Any]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As of Qwen 2."""

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The same, marking what the assistant writes."""

TURNS = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
"""As of Mistral: no prompt for an answer, and no other roles."""

PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Text alone, in which nothing ends an answer but the next line."""

FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As of Qwen 3: what the assistant thought is left out where the conversation goes on."""


def said(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation of user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def tokenizer(template: str | None) -> PreTrainedTokenizerBase:
    """Bytes, 256 `<|im_end|>`, which also ends documents, and 257 `<|im_start|>`."""
    made = byte_level(256, "<|im_end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = template
    return made


def saved(template: str | None, folder: Path) -> Path:
    """The folder, with such a tokenizer."""
    tokenizer(template).save_pretrained(folder)
    return folder


def write_chats(path: Path, chats: list[list[dict[str, str]]], key: str = "messages") -> Path:
    """A table of conversations."""
    path.write_text("".join(json.dumps({key: chat}) + "\n" for chat in chats))
    return path

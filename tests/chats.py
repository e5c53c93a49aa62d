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
"""CHATML, with the assistant's tokens marked by `{% generation %}`."""

TURNS = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
"""As of Mistral: no generation prompt, and no roles besides user and assistant."""

PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Plain text without special tokens; a newline ends an answer."""

FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As of Qwen 3: the assistant's thinking is left out once the conversation continues."""


def conversation(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def tokenizer(template: str | None) -> PreTrainedTokenizerBase:
    """A byte tokenizer: id 256 is `<|im_end|>`, which also ends documents, and 257 is `<|im_start|>`."""
    result = byte_level(256, "<|im_end|>")
    result.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    result.chat_template = template
    return result


def save_tokenizer(template: str | None, folder: Path) -> Path:
    """Save such a tokenizer in a folder, and return the folder."""
    tokenizer(template).save_pretrained(folder)
    return folder


def write_chats(path: Path, chats: list[list[dict[str, str]]], key: str = "messages") -> Path:
    """Write conversations as JSON Lines."""
    path.write_text("".join(json.dumps({key: chat}) + "\n" for chat in chats))
    return path

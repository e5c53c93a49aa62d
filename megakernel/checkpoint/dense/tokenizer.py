"""Tokenizers in checkpoint folders: writing one, and telling whether a folder has one."""

from pathlib import Path

from data_pipeline.tokenizers import ByteTokenizer, Tokenizer

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""`AutoTokenizer` needs at least one of them."""


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer for `AutoTokenizer`, with the token ids that the model was trained on."""
    if isinstance(tokenizer, ByteTokenizer):
        tokenizer.for_transformers().save_pretrained(folder)
    else:
        tokenizer.save(folder)


def has_tokenizer(folder: Path) -> bool:
    """Whether `AutoTokenizer` finds a tokenizer in a folder."""
    return any((folder / name).is_file() for name in _FILES)

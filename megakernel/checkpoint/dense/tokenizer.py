"""The tokenizers of checkpoints: how ours goes out, and whether one lies there."""

from pathlib import Path

from data_pipeline.tokenizers import ByteTokenizer, Tokenizer

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""One of them at least lies where `AutoTokenizer` finds a tokenizer."""


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write it in the form that `AutoTokenizer` reads, with the ids that the model was trained on."""
    if isinstance(tokenizer, ByteTokenizer):
        tokenizer.for_transformers().save_pretrained(folder)
    else:
        tokenizer.save(folder)


def has_tokenizer(folder: Path) -> bool:
    """Whether `AutoTokenizer` finds one there."""
    return any((folder / name).is_file() for name in _FILES)

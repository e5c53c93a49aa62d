"""The tokenizers of checkpoints: how ours goes out, and whether data was prepared with the one that lies there."""

from pathlib import Path

from data_pipeline import tokenizers
from data_pipeline.tokenizers import ByteTokenizer, Tokenizer
from megakernel.checkpoint.trained_run import tokenizer_folder
from megakernel.config import UserError

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""One of them at least lies where `AutoTokenizer` finds a tokenizer."""


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write it in the form that `AutoTokenizer` reads, with the ids that the model was trained on."""
    if isinstance(tokenizer, ByteTokenizer):
        tokenizer.for_transformers().save_pretrained(folder)
    else:
        tokenizer.save(folder)


def check_tokenizer(
    key: str, source: Path, digest: str, corpus: Path, *, add_bos: bool = False
) -> str | None:
    """Refuse data of another tokenizer than a model has learned with: its ids would stand for other words.

    Args:
        key: of the configuration, which names the source.
        source: a run, one of its checkpoints, or a dense model.
        digest: `Tokenizer.hash` of the data.
        corpus: the data's folder.
        add_bos: whether its documents begin with BOS.

    Returns:
        A remark where `source` has no tokenizer to compare with, or begins documents otherwise.

    Raises:
        UserError: another tokenizer.
    """
    folder = _folder(source)
    if folder is None:
        return f"{source} has no tokenizer: whether {corpus} was prepared with the same one is not known"
    source_tokenizer = tokenizers.load(folder, own_rule=folder == source)
    if source_tokenizer.hash != digest:
        raise UserError(
            f"{key}={source} has another tokenizer than data.train={corpus}; prepare the data with "
            f"`megakernel prepare --tokenizer {folder}`"
        )
    if source_tokenizer.add_bos != add_bos:
        flag = "--add-bos" if source_tokenizer.add_bos else "--no-add-bos"
        return (
            f"documents begin with BOS in {source if source_tokenizer.add_bos else corpus} and not in "
            f"{corpus if source_tokenizer.add_bos else source}; prepare the data with `megakernel prepare {flag}` "
            "to keep what the weights have learned with"
        )
    return None


def has_tokenizer(folder: Path) -> bool:
    """Whether `AutoTokenizer` finds one there."""
    return any((folder / name).is_file() for name in _FILES)


def _folder(source: Path) -> Path | None:
    if has_tokenizer(source):
        return source
    checkpoints = source.resolve().parent
    run = checkpoints.parent if checkpoints.name == "checkpoints" else source
    return folder if (folder := tokenizer_folder(run)).is_dir() else None

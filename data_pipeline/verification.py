"""A corpus held against its manifest, once on a machine: reading all of it at every start would take too long."""

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline import tokenizers
from data_pipeline.manifest import FileRecord, Manifest
from data_pipeline.token_files import INDEX_HEADER
from megakernel.config.errors import UserError

_log = logging.getLogger(__name__)

_LARGE = 2**32
"""Bytes from which on reading takes seconds, so that it is said."""

# Negative ids, if any, become large ones.
TOKEN_TYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<u4"), 5: np.dtype("<u8"), 8: np.dtype("<u2")}
"""Code of a type of tokens in Megatron's index -> the type."""


def verify_split(folder: Path, manifest: Manifest, split: str, token_type: int) -> None:
    """Check that a split's files are those that were prepared, and hold ids of the tokenizer alone.

    token_type: Megatron's code of the tokens' type. Raises UserError, which reads on from the folder's name.
    """
    records = manifest.files(split)
    once(
        [folder / name for name in records],
        f"{records} {manifest.tokenizer.vocab_size}",
        lambda: _verify(folder, records, f"{split}.bin", token_type, manifest.tokenizer.vocab_size),
    )


def verify_tokenizer(folder: Path, manifest: Manifest) -> None:
    """Check that the manifest tells the size of the tokenizer beside it. Raises UserError as `verify_split` does."""
    place = folder / "tokenizer"
    if not place.is_dir():
        raise UserError("lacks tokenizer/")
    files = sorted(path for path in place.rglob("*") if path.is_file())
    once(files, str(manifest.tokenizer.vocab_size), lambda: _verify_size(place, manifest))


def once(files: Iterable[Path], promise: str, check: Callable[[], None]) -> None:
    """Run a check, unless it has passed on this machine for these files as they are now and the same promise.

    The markers lie in the user's cache folder, not with the files, which may come from somewhere else.
    """
    stats = [
        (str(file.resolve()), found.st_size, found.st_mtime_ns, found.st_ino)
        for file in files
        for found in [file.stat()]
    ]
    name = hashlib.sha256(f"{stats} {promise}".encode()).hexdigest()
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        marker = home / "megakernel" / "verified" / name
        marker.parent.mkdir(parents=True, exist_ok=True)
        stream = marker.open("a+")
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return check()
    with stream:
        with suppress(OSError):
            # The ranks of a machine start together: one reads, the others wait for its result.
            fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        if not stream.read():
            check()
            with suppress(OSError):
                stream.write("passed\n")
                stream.flush()


def _verify(
    folder: Path, records: dict[str, FileRecord], tokens: str, token_type: int, vocab_size: int
) -> None:
    size = sum(record.size for record in records.values())
    if size > _LARGE:
        _log.warning("reading %s once, to hold it against its manifest (%.1f GB)", folder, size / 1e9)
    for name, expected in records.items():
        largest = _Largest(TOKEN_TYPES[token_type]) if name == tokens else None
        if FileRecord.of(folder / name, largest) != expected:
            raise UserError(f"holds a damaged {name} (its SHA-256 is not that of the manifest)")
        if largest is not None and largest.id >= vocab_size:
            raise UserError(f"holds the id {largest.id} in {name}, and its tokenizer has {vocab_size} ids")
    for name in filter(lambda name: name.endswith(".bin"), records):
        _verify_places(folder / name, TOKEN_TYPES[token_type].itemsize if name == tokens else 1)


def _verify_places(tokens: Path, width: int) -> None:
    """Check that the documents of Megatron's index lie one after the other in a file of so many bytes a token."""
    index = tokens.with_suffix(".idx")
    with index.open("rb") as stream:
        *_, count, _ = INDEX_HEADER.unpack(stream.read(INDEX_HEADER.size))
        lengths = np.fromfile(stream, "<i4", count).astype(np.int64)
        starts = np.fromfile(stream, "<i8", count)
    ends = np.cumsum(lengths) * width
    if (
        (lengths < 0).any()
        or not np.array_equal(starts, ends - lengths * width)
        or ends[-1:] != tokens.stat().st_size
    ):
        raise UserError(f"holds a {index.name} whose documents are not those of {tokens.name}")


class _Largest:
    """The largest id of the chunks that it was called with."""

    def __init__(self, dtype: np.dtype[Any]):
        self.id = 0
        self._dtype = dtype

    def __call__(self, chunk: bytes) -> None:
        whole = len(chunk) - len(chunk) % self._dtype.itemsize
        self.id = max(self.id, int(np.frombuffer(chunk[:whole], self._dtype).max(initial=0)))


def _verify_size(place: Path, manifest: Manifest) -> None:
    found, told = tokenizers.load(place).vocab_size, manifest.tokenizer.vocab_size
    if found != told:
        raise UserError(f"has a tokenizer of {found} ids, and its manifest tells of {told}")

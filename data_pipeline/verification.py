"""Verification of a corpus against its manifest, once per machine: reading all of it at every start takes too long."""

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

_SLOW_BYTES = 2**32
"""Bytes above which a message is logged, since reading takes seconds."""

# Unsigned, so that invalid negative ids become large ones.
TOKEN_TYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<u4"), 5: np.dtype("<u8"), 8: np.dtype("<u2")}
"""Megatron's type code -> dtype of the tokens."""


def verify_split(folder: Path, manifest: Manifest, split: str, token_type: int) -> None:
    """Check that a split's files are those that were prepared, and hold only ids of the tokenizer.

    token_type: Megatron's type code. Raises UserError; its message continues the folder's name.
    """
    records = manifest.files(split)
    check_once(
        [folder / name for name in records],
        f"{records} {manifest.tokenizer.vocab_size}",
        lambda: _verify(folder, records, f"{split}.bin", token_type, manifest.tokenizer.vocab_size),
    )


def verify_tokenizer(folder: Path, manifest: Manifest) -> None:
    """Check that the manifest's vocabulary size is the tokenizer's. Raises UserError as `verify_split` does."""
    own_folder, recorded = folder / "tokenizer", manifest.tokenizer.vocab_size
    if not own_folder.is_dir():
        raise UserError("lacks tokenizer/")

    def check() -> None:
        if (actual := tokenizers.load(own_folder).vocab_size) != recorded:
            raise UserError(f"has a tokenizer of {actual} ids, but its manifest says {recorded}")

    check_once(sorted(path for path in own_folder.rglob("*") if path.is_file()), str(recorded), check)


def user_cache() -> Path:
    """The folder of the user's own caches. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megakernel"


def check_once(files: Iterable[Path], expectation: str, check: Callable[[], None]) -> None:
    """Run a check, unless it has passed on this machine for the same `expectation` and these files as they are now.

    Markers are in the user's cache folder, not beside the files: copied files must be checked again.
    """
    stats = [
        (str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino)
        for file in files
        for stat in [file.stat()]
    ]
    name = hashlib.sha256(f"{stats} {expectation}".encode()).hexdigest()
    try:
        marker = user_cache() / "verified" / name
        marker.parent.mkdir(parents=True, exist_ok=True)
        stream = marker.open("a+")
    except (OSError, RuntimeError):  # no home, or it is not writable
        return check()
    with stream:
        with suppress(OSError):
            # The ranks of a machine start together: one checks, the others wait for it.
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
    if size > _SLOW_BYTES:
        _log.warning("reading %s once, to check it against its manifest (%.1f GB)", folder, size / 1e9)
    for name, expected in records.items():
        largest = _LargestId(TOKEN_TYPES[token_type]) if name == tokens else None
        if FileRecord.of(folder / name, largest) != expected:
            raise UserError(f"holds a damaged {name} (its SHA-256 is not that of the manifest)")
        if largest is not None and largest.id >= vocab_size:
            raise UserError(f"holds the id {largest.id} in {name}, but its tokenizer has {vocab_size} ids")
    for name in filter(lambda name: name.endswith(".bin"), records):
        _verify_index(folder / name, TOKEN_TYPES[token_type].itemsize if name == tokens else 1)


def _verify_index(tokens: Path, width: int) -> None:
    """Check that the documents of the index are contiguous and fill the file of tokens of `width` bytes."""
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


class _LargestId:
    """Callable that tracks the largest id of all chunks."""

    def __init__(self, dtype: np.dtype[Any]):
        self.id = 0
        self._dtype = dtype

    def __call__(self, chunk: bytes) -> None:
        whole = len(chunk) - len(chunk) % self._dtype.itemsize
        self.id = max(self.id, int(np.frombuffer(chunk[:whole], self._dtype).max(initial=0)))

"""Verification of a corpus against its manifest, once as long as its files do not change: reading it takes hours."""

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from data_pipeline import tokenizers
from data_pipeline.manifest import FileRecord, Manifest
from data_pipeline.token_files import INDEX_HEADER
from megakernel.config.errors import UserError

_log = logging.getLogger(__name__)

_SLOW_BYTES = 2**32
"""Bytes above which a message is logged, since reading takes seconds."""

# Unsigned, so that invalid negative ids become large ones.
TOKEN_TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    4: np.dtype("<u4"),
    5: np.dtype("<u8"),
    8: np.dtype("<u2"),
}
"""Megatron's type code -> dtype of the tokens."""


def verify_split(folder: Path, manifest: Manifest, split: str, further: Sequence[Path] = ()) -> None:
    """Check that a split's files are those that were prepared, and hold only ids of the tokenizer.

    further: see `check_once`. Raises UserError; its message continues the folder's name.
    """
    records = manifest.files(split)
    check_once(
        folder,
        split,
        [folder / name for name in records],
        f"{records} {manifest.tokenizer.vocab_size}",
        lambda: _verify(folder, records, split, manifest.tokenizer.vocab_size),
        further,
    )


def check_unchanged(out: Path, manifest: Manifest) -> None:
    """Raise UserError unless the folder of a command's --out still has what its manifest records; reads every file."""
    for split in manifest.splits:
        for name, expected in manifest.files(split).items():
            file = out / name
            if not file.is_file() or FileRecord.of(file) != expected:
                raise UserError(
                    f"{file} is missing or changed since it was prepared; add --overwrite to make it again"
                )
    try:
        verify_tokenizer(out, manifest)
    except UserError as error:
        raise UserError(f"--out {out} {error}; add --overwrite to make it again") from None


def verify_tokenizer(folder: Path, manifest: Manifest, further: Sequence[Path] = ()) -> None:
    """Check that the manifest's vocabulary size is the tokenizer's. Raises UserError as `verify_split` does."""
    own_folder, recorded = folder / "tokenizer", manifest.tokenizer.vocab_size
    if not own_folder.is_dir():
        raise UserError("lacks tokenizer/")

    def check() -> None:
        if (actual := tokenizers.load(own_folder).vocab_size) != recorded:
            raise UserError(f"has a tokenizer of {actual} ids, but its manifest says {recorded}")

    files = sorted(path for path in own_folder.rglob("*") if path.is_file())
    check_once(folder, "tokenizer", files, str(recorded), check, further)


def user_cache() -> Path:
    """The folder of the user's own caches. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megakernel"


def is_writable(folder: Path) -> bool:
    """Whether files may be made in a folder; root respects one that nobody may write, too."""
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def check_once(
    folder: Path,
    what: str,
    files: Sequence[Path],
    expectation: str,
    check: Callable[[], None],
    further: Sequence[Path] = (),
) -> None:
    """Run a check, unless it has passed for the same `expectation` and these files as they are now.

    Passing leaves a marker in `folder`, where all who read the files find it; if that is read-only, in the first of
    `further` that is not, or in the user's cache. It names the files by inode and time: copies are checked again.
    """
    stats = [
        (file.name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for file in files for stat in [file.stat()]
    ]
    passed = hashlib.sha256(f"{stats} {expectation}".encode()).hexdigest()
    beside = folder / _MARKERS / what
    if _read(beside) == passed:
        return
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    markers = [beside] if is_writable(folder) else []
    markers += [other / f"{place}-{what}" for other in further]
    with suppress(RuntimeError):
        markers.append(user_cache() / "verified" / f"{place}-{what}")
    if any(_read(marker) == passed for marker in markers):
        return
    with _first_writable(markers) as stream:
        if stream is None:
            return check()
        with suppress(OSError):
            # Jobs may start together: one checks, the others wait for it.
            fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        if stream.read() != passed:
            check()
            with suppress(OSError):
                stream.truncate(0)
                stream.write(passed)
                stream.flush()


_MARKERS = ".verified"


def _read(marker: Path) -> str | None:
    try:
        return marker.read_text(encoding="ascii")
    except (OSError, UnicodeError):
        return None


@contextmanager
def _first_writable(markers: Sequence[Path]) -> Iterator[TextIO | None]:
    """The first of the files that can be written, open for that; None if none can."""
    for marker in markers:
        try:
            marker.parent.mkdir(parents=True, exist_ok=True)
            stream = marker.open("a+", encoding="ascii")
        except OSError:
            continue
        with stream:
            yield stream
        return
    yield None


def _verify(folder: Path, records: dict[str, FileRecord], split: str, vocab_size: int) -> None:
    tokens = f"{split}.bin"
    with (folder / f"{split}.idx").open("rb") as stream:
        _, _, token_type, _, _ = INDEX_HEADER.unpack(stream.read(INDEX_HEADER.size))
    size = sum(record.size for record in records.values())
    if size > _SLOW_BYTES:
        _log.warning("reading %s once, to check it against its manifest (%.1f GB)", folder, size / 1e9)
    for name, expected in records.items():
        largest = LargestId(TOKEN_TYPES[token_type]) if name == tokens else None
        if FileRecord.of(folder / name, largest) != expected:
            raise UserError(f"holds a damaged {name} (its SHA-256 is not that of the manifest)")
        if largest is not None and largest.id >= vocab_size:
            raise UserError(f"holds the id {largest.id} in {name}, but its tokenizer has {vocab_size} ids")
    for name in filter(lambda name: name.endswith(".bin"), records):
        verify_index(folder / name, TOKEN_TYPES[token_type].itemsize if name == tokens else 1)


def verify_index(tokens: Path, width: int) -> None:
    """Check that the documents of the index are contiguous and fill the file of tokens of `width` bytes."""
    index = tokens.with_name(tokens.name.removesuffix(".bin") + ".idx")
    with index.open("rb") as stream:
        *_, count, bounds_count = INDEX_HEADER.unpack(stream.read(INDEX_HEADER.size))
        lengths = np.fromfile(stream, "<i4", count).astype(np.int64)
        starts = np.fromfile(stream, "<i8", count)
        bounds = np.fromfile(stream, "<i8", bounds_count)
    ends = np.cumsum(lengths) * width
    if (
        (lengths < 0).any()
        or not np.array_equal(starts, ends - lengths * width)
        or ends[-1:] != tokens.stat().st_size
        or not _are_bounds(bounds, count)
    ):
        raise UserError(f"holds a {index.name} whose documents are not those of {tokens.name}")


def _are_bounds(bounds: np.ndarray, count: int) -> bool:
    """Whether documents begin at these sequences, of `count`. As many as sequences: each is one."""
    if len(bounds) == count + 1:
        return np.array_equal(bounds, np.arange(count + 1))
    steps = np.diff(bounds)
    return bool(bounds[:1] == 0 and bounds[-1:] == count and (steps >= 0).all())


class LargestId:
    """Callable that tracks the largest id of all chunks."""

    def __init__(self, dtype: np.dtype[Any]):
        self.id = 0
        self._dtype = dtype

    def __call__(self, chunk: bytes) -> None:
        """Look at the next chunk of the file."""
        whole = len(chunk) - len(chunk) % self._dtype.itemsize
        self.id = max(self.id, int(np.frombuffer(chunk[:whole], self._dtype).max(initial=0)))

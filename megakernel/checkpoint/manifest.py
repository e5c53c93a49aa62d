"""A complete checkpoint: a folder whose manifest, written last, lists its files and their checksums."""

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import xxhash

from megakernel.config import UserError
from megakernel.parallel.ranks import Ranks

MANIFEST = "complete.json"
_CHECKSUM_KEY = "checksum"
"""The manifest's key with the checksum of all its other keys."""


class Damaged(UserError):
    """Files differ from those that were saved."""


class SavedFile(NamedTuple):
    """Size and checksum of a file when it was saved."""

    size: int
    """Bytes."""

    checksum: str | None
    """XXH3, 64 bits, hexadecimal; None if written by a version without checksums."""

    @classmethod
    def of(cls, file: Path) -> "SavedFile":
        """The record of a file on disk; reads all of it."""
        stat = file.stat()
        return cls(stat.st_size, _checksum(file, stat.st_size, stat.st_mtime_ns))

    def compare(self, file: Path, name: str) -> None:
        """Raise Damaged, with a message that begins with `name`, if a file's size or checksum differs."""
        if self.checksum is not None and SavedFile.of(file) != self:
            raise Damaged(f"{name} is damaged: its checksum is not that of saving")

    def check(self, file: Path, name: str) -> None:
        """`compare` a file that will be loaded; raise UserError if it names code that loading would run."""
        self.compare(file, name)
        if file.suffix == ".pt":
            from . import weights_only

            weights_only.check(file, name)


class Abandoned(Exception):
    """Writing a file was given up, because the process ends."""


_PIECE = 2**24
"""Bytes of one write, after which a file may be abandoned."""


class RecordedFile:
    """A new file that is checksummed as it is written, so that it need not be read again, and flushed at its end.

    abandoned: if set, writing raises Abandoned.
    """

    def __init__(self, path: Path, abandoned: Event):
        self._file = path.open("wb", buffering=0)
        self._digest = xxhash.xxh3_64()
        self._size = 0
        self._abandoned = abandoned

    def __enter__(self) -> "RecordedFile":
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        with self._file:
            if kind is None:
                os.fsync(self._file.fileno())

    def write(self, data: Any) -> int:
        """Write all bytes of a buffer; returns their number."""
        rest = memoryview(data).cast("B")
        while rest:
            if self._abandoned.is_set():
                raise Abandoned
            written = self._file.write(rest[:_PIECE])
            self._digest.update(rest[:written])
            self._size += written
            rest = rest[written:]
        return memoryview(data).nbytes

    def flush(self) -> None:
        """For torch.save: nothing, because there is no buffer."""

    @property
    def record(self) -> SavedFile:
        """Size and checksum of what was written."""
        return SavedFile(self._size, self._digest.hexdigest())


@dataclass(frozen=True)
class SavedProgress:
    """The run's progress, its layout and the versions of the software that wrote the checkpoint."""

    step: int
    """Optimizer steps done."""

    consumed_samples: int
    """Training samples consumed: the position in the data."""

    consumed_tokens: int
    """Training tokens consumed."""

    layout: dict[str, int]
    """tensor, context, data, pipeline, zero_stage."""

    versions: dict[str, str]
    """Package -> version."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A folder `step_N` and the contents of its manifest."""

    folder: Path
    progress: SavedProgress

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.progress.step

    files: Mapping[str, SavedFile] = field(default_factory=dict, compare=False)
    """By name relative to the folder."""

    @classmethod
    def read(cls, folder: Path) -> "SavedCheckpoint":
        """Read the manifest and compare it with the sizes of the files.

        Raises Damaged, with the reason, if the checkpoint is incomplete or damaged.
        """
        manifest, files = read_manifest(folder)
        try:
            progress = SavedProgress(**manifest["progress"])
        except (KeyError, TypeError):
            raise Damaged(f"{MANIFEST} is damaged") from None
        return cls(folder, progress, files)

    @classmethod
    def verified(cls, folder: Path, ranks: Ranks) -> "SavedCheckpoint":
        """`read`, then verify checksums, a share of the files on each rank.

        Raises UserError, alike on all ranks, if a file is damaged, cannot be read, or names code.
        """
        checkpoint = ranks.on_rank_zero(lambda: cls.read(folder))
        verify(folder, checkpoint.files, ranks)
        return checkpoint


def read_manifest(folder: Path) -> tuple[dict[str, Any], dict[str, SavedFile]]:
    """A folder's manifest, and the records of its files by name.

    Raises Damaged if it is damaged or cannot be read, or if a file's size is wrong.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        checksum = manifest.pop(_CHECKSUM_KEY, None)
        checksums = manifest.get("checksums", {})
        files = {name: SavedFile(int(size), checksums.get(name)) for name, size in manifest["files"].items()}
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing, so it was not written to its end") from None
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise Damaged(f"{MANIFEST} is damaged") from None
    if checksum is not None and checksum != _checksum_of(manifest):
        raise Damaged(f"{MANIFEST} is damaged: its checksum is not that of saving")
    for name, record in files.items():
        # One question per file: a checkpoint of a thousand nodes has thousands.
        try:
            found = (folder / name).stat()
        except OSError:
            raise Damaged(f"{name} is missing") from None
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{name} is missing")
        if found.st_size != record.size:
            raise Damaged(f"{name} has {found.st_size} bytes instead of {record.size}")
    return manifest, files


def verify(folder: Path, files: Mapping[str, SavedFile], ranks: Ranks) -> None:
    """Verify checksums, about as many bytes on each rank; raises as `SavedCheckpoint.verified` does."""
    largest_first = sorted(files, key=lambda name: (-files[name].size, name))
    ranks.each(lambda: _check(folder, files, largest_first[ranks.rank :: ranks.size]))


def _check(folder: Path, files: Mapping[str, SavedFile], names: Iterable[str]) -> None:
    for name in names:
        try:
            files[name].check(folder / name, name)
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from None


def write_manifest(folder: Path, progress: SavedProgress, files: Mapping[str, SavedFile]) -> Path:
    """Write the manifest. files: by name relative to `folder`."""
    manifest = {
        "progress": asdict(progress),
        "files": {name: record.size for name, record in files.items()},
        "checksums": {name: record.checksum for name, record in files.items()},
    }
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest | {_CHECKSUM_KEY: _checksum_of(manifest)}, indent=1) + "\n")
    return path


def flushed(folder: Path, files: Iterable[Path]) -> dict[str, SavedFile]:
    """Flush files to disk; return their records by name relative to `folder`. A full disk may raise only here."""
    records = {}
    for file in files:
        flush(file)
        records[file.relative_to(folder).as_posix()] = SavedFile.of(file)
    return records


def flush(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# One command may verify the same checkpoint several times; a changed file has another modification time.
@cache
def _checksum(file: Path, size: int, modified: int) -> str:
    digest = xxhash.xxh3_64()
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


_CHUNK = 2**22


def _checksum_of(manifest: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def step_of(folder: Path) -> int | None:
    """N of a folder `step_N`; None for any other name."""
    match = re.fullmatch(r"step_(\d+)", folder.name)
    return int(match[1]) if match else None

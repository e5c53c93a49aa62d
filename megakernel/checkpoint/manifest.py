"""A finished checkpoint: a folder whose manifest, written last, says what must lie in it."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from megakernel.config import UserError
from megakernel.parallel.ranks import Ranks

MANIFEST = "complete.json"
_OWN = "checksum"
"""The manifest's key of the checksum of all its other keys."""


class Damaged(UserError):
    """What was saved is not what lies there."""


class FileRecord(NamedTuple):
    """A file as it was saved."""

    size: int
    """Bytes."""

    checksum: str | None
    """XXH3, 64 bits, hexadecimal; None where a version of before checksums wrote it."""

    @classmethod
    def of(cls, file: Path) -> "FileRecord":
        """A file as it lies there; reads all of it."""
        found = file.stat()
        return cls(found.st_size, _checksum(file, found.st_size, found.st_mtime_ns))

    def compare(self, file: Path, name: str) -> None:
        """Damaged, beginning with `name`, where a file is another one."""
        if self.checksum is not None and FileRecord.of(file) != self:
            raise Damaged(f"{name} is damaged: its checksum is not that of saving")

    def check(self, file: Path, name: str) -> None:
        """`compare` a file that will be loaded; UserError where that would run code which it names."""
        self.compare(file, name)
        if file.suffix == ".pt":
            from . import weights_only

            weights_only.check(file, name)


@dataclass(frozen=True)
class SavedProgress:
    """How far the run was, and what wrote the checkpoint."""

    step: int
    """Optimizer steps done."""

    consumed_samples: int
    """Training samples behind it: the position in the data."""

    consumed_tokens: int
    """Training tokens behind it."""

    layout: dict[str, int]
    """tensor, context, data, pipeline, zero_stage."""

    versions: dict[str, str]
    """Package -> version."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder `step_N` and what its manifest says."""

    folder: Path
    progress: SavedProgress

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.progress.step

    files: Mapping[str, FileRecord] = field(default_factory=dict, compare=False)
    """By name relative to the folder."""

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        """Read the manifest and hold it against the sizes of the files.

        Raises Damaged with the reason where the checkpoint is half-written or damaged.
        """
        manifest, files = read_manifest(folder)
        try:
            progress = SavedProgress(**manifest["progress"])
        except (KeyError, TypeError):
            raise Damaged(f"{MANIFEST} is damaged") from None
        return cls(folder, progress, files)

    @classmethod
    def verified(cls, folder: Path, ranks: Ranks) -> "Checkpoint":
        """`read`, and every rank holds a share of the files against their checksums.

        Raises UserError, alike on all ranks, where a file is not what was saved, cannot be read, or names code.
        """
        checkpoint = ranks.first(lambda: cls.read(folder))
        verify(folder, checkpoint.files, ranks)
        return checkpoint


def read_manifest(folder: Path) -> tuple[dict[str, Any], dict[str, FileRecord]]:
    """A folder's manifest, and its files by name, whose sizes are right. Raises Damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        own = manifest.pop(_OWN, None)
        checksums = manifest.get("checksums", {})
        files = {name: FileRecord(int(size), checksums.get(name)) for name, size in manifest["files"].items()}
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing, so it was not written to its end") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(f"{MANIFEST} is damaged") from None
    if own is not None and own != _checksum_of(manifest):
        raise Damaged(f"{MANIFEST} is damaged: its checksum is not that of saving")
    for name, record in files.items():
        file = folder / name
        if not file.is_file():
            raise Damaged(f"{name} is missing")
        if (size := file.stat().st_size) != record.size:
            raise Damaged(f"{name} has {size} bytes instead of {record.size}")
    return manifest, files


def verify(folder: Path, files: Mapping[str, FileRecord], ranks: Ranks) -> None:
    """Let every rank read about as many bytes of the files as the others; raises as `Checkpoint.verified` does."""
    largest_first = sorted(files, key=lambda name: (-files[name].size, name))
    ranks.alike(lambda: _check(folder, files, largest_first[ranks.rank :: ranks.size]))


def _check(folder: Path, files: Mapping[str, FileRecord], names: Iterable[str]) -> None:
    for name in names:
        try:
            files[name].check(folder / name, name)
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from None


def write_manifest(folder: Path, progress: SavedProgress | None, files: Mapping[str, FileRecord]) -> Path:
    """Write the manifest; `files` by name relative to `folder`. progress: None for what is no checkpoint itself."""
    manifest = {
        **({"progress": asdict(progress)} if progress else {}),
        "files": {name: record.size for name, record in files.items()},
        "checksums": {name: record.checksum for name, record in files.items()},
    }
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest | {_OWN: _checksum_of(manifest)}, indent=1) + "\n")
    return path


def flushed(folder: Path, files: Iterable[Path]) -> dict[str, FileRecord]:
    """Put files on the disk; their records, by name relative to `folder`. A full disk may show itself only here."""
    records = {}
    for file in files:
        flush(file)
        records[file.relative_to(folder).as_posix()] = FileRecord.of(file)
    return records


def flush(path: Path) -> None:
    """Put a file's bytes, or a folder's entries, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# A command asks for the same checkpoint several times; a file that was changed has another time.
@cache
def _checksum(file: Path, size: int, changed: int) -> str:
    digest = xxhash.xxh3_64()
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


_CHUNK = 2**22


def _checksum_of(manifest: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def step_of(folder: Path) -> int | None:
    """N of a folder `step_N`, None for any other name."""
    match = re.fullmatch(r"step_(\d+)", folder.name)
    return int(match[1]) if match else None

"""What the data of a large run costs at its start and before: prepared in parts, merged, blended; counted.

`python -m benchmarks.scaling` prints these counts beside its own.
"""

import json
import os
import pickle
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console

from benchmarks.file_operations import file_operations
from data_pipeline import tokenizers
from data_pipeline.corpus import Corpora
from data_pipeline.loader import TrainingBatches
from data_pipeline.manifest import FILE, FileRecord
from data_pipeline.merge import merge
from data_pipeline.order import Share
from data_pipeline.prepare import PrepareRequest, prepare
from data_pipeline.source_names import open_source
from megakernel.config import Config

Counts = dict[str, float]

QUIET = Console(quiet=True)

CORPORA = 20
"""Corpora of the start that is counted."""

SHARDS, SOURCES, PARTS = 100, 1000, 8
"""Folders that are merged, corpora that are blended, and parts of a source that are prepared."""


def _prepare(folder: Path) -> Path:
    """A prepared folder of nine small texts."""
    (folder / "text").mkdir(parents=True)
    for number in range(9):
        (folder / "text" / f"{number}.txt").write_text(f"text {number} " * 50)
    request = PrepareRequest(source=[str(folder / "text")], tokenizer="byte", validation_fraction=0.2)
    prepare(request, folder / "prepared", workers=1, overwrite=False, console=QUIET)
    return folder / "prepared"


def _copies(original: Path, folder: Path, count: int) -> list[Path]:
    """So many prepared folders of different contents."""
    folders = [folder / f"{number:04}" for number in range(count)]
    manifest = json.loads((original / FILE).read_text())
    for number, copy in enumerate(folders):
        shutil.copytree(original, copy)
        tokens = bytearray((copy / "train.bin").read_bytes())
        tokens[0], tokens[2] = number % 256, number // 256  # of two uint16 tokens
        (copy / "train.bin").write_bytes(tokens)
        manifest["splits"]["train"]["bin"] = FileRecord.of(copy / "train.bin").model_dump()
        (copy / FILE).write_text(json.dumps(manifest))
    return folders


def _config(corpora: list[Path], index: Path) -> Config:
    return Config(
        run={"name": "start"},
        model={"num_layers": 1, "hidden_size": 64, "num_heads": 2},
        data={"train": list(map(str, corpora)), "index_cache": index, "num_workers": 0},
        training={"steps": 500, "seq_len": 64, "global_batch_size": 8, "micro_batch_size": 8},
    )


def start_counts(folder: Path) -> Counts:
    """File operations of a run's start on CORPORA prepared folders."""
    corpora = folder / "corpora"
    config = _config(_copies(_prepare(folder), corpora, CORPORA), folder / "index")
    counts: Counts = {}
    for start in ("first start", "later start"):
        with file_operations(corpora) as operations:
            opened = Corpora(config.data)
        counts[f"data, {start}: file operations of rank 0 for a corpus"] = len(operations) / CORPORA
    sent = pickle.dumps(opened)
    TrainingBatches(config, opened, Share())  # builds the indices
    with file_operations(folder) as operations:
        TrainingBatches(config, pickle.loads(sent), Share(), builds_index=False)
    counts["data: file operations of each other rank"] = len(operations)
    counts["data: bytes that a rank receives for a corpus"] = len(sent) / CORPORA
    return counts


def blend_counts(folder: Path, sources: int = SOURCES) -> Counts:
    """What a blend of many corpora costs, in a process that may open 1,024 files unless it asks for more."""
    corpora = _copies(_prepare(folder), folder / "corpora", sources)
    config, index = _config(corpora, folder / "index"), folder / "index"
    name = f"blend of {sources:,} corpora"
    counts: Counts = {}
    began, memory = time.process_time(), _resident()
    opened = Corpora(config.data)
    with _few_files(), file_operations(index) as operations:
        batches = TrainingBatches(config, opened, Share(), builds_index=False)
        batches.build()
        counts[f"{name}, first start: file operations on indices, for a corpus"] = len(operations) / sources
        counts[f"{name}, first start: seconds of a core"] = time.process_time() - began
        began = time.process_time()
        with file_operations(index) as operations:
            batches = TrainingBatches(config, Corpora(config.data), Share(), builds_index=False)
            batches.build()
        counts[f"{name}, later start: file operations on indices, for a corpus"] = len(operations) / sources
        counts[f"{name}, later start: seconds of a core"] = time.process_time() - began
        batches.packing()  # rank 0 opens each
        steps = batches.from_step(0)
        for _ in range(config.training.steps):
            next(steps)
        counts[f"{name}: files that a process has open after {500 * 8:,} samples"] = _open_files()
        counts[f"{name}: MiB of memory of rank 0"] = (_resident() - memory) / 2**20
        counts[f"{name}: bytes that a rank receives"] = len(pickle.dumps(opened))
    return counts


def merge_counts(folder: Path, shards: int = SHARDS) -> Counts:
    """What `megakernel merge` opens, loads and reads for each of many folders."""
    folders = _copies(_prepare(folder), folder / "shards", shards)
    loaded: list[Path] = []
    most = 0
    load, read = tokenizers.load, FileRecord.of
    again = 0

    def count_load(path: Path, **options: Any) -> Any:
        nonlocal most
        loaded.append(path)
        return load(path, **options)

    def count_read(file: Path, *look: Any) -> FileRecord:
        nonlocal again, most
        if file.suffix == ".bin" and "shards" not in file.parts:
            again += file.stat().st_size
        most = max(most, _open_files())
        return read(file, *look)

    with (
        patch.object(tokenizers, "load", count_load),
        patch.object(FileRecord, "of", staticmethod(count_read)),
        _watching_open_files() as open_files,
        file_operations(folder / "shards") as operations,
    ):
        merged = merge(folders, folder / "merged", overwrite=False, console=QUIET)
    assert merged is not None
    size = sum(split.bin.size for split in merged.splits.values())
    return {
        "merge: file operations for a folder": len(operations) / shards,
        "merge: tokenizers that are loaded, for a folder": len(loaded) / shards,
        "merge: files that are open at most, for a folder": max(most, *open_files) / shards,
        "merge: bytes of tokens that are read again, for each": again / size,
    }


def part_counts(folder: Path, parts: int = PARTS) -> Counts:
    """What the jobs of an array, each with a part of one source, open and look for of it."""
    files = 10 * parts
    folder.mkdir()
    for number in range(files):
        (folder / f"{number}.txt").write_text(f"text {number} " * 50)
    opened: list[int] = []
    asked: list[int] = []
    for number in range(parts):
        with file_operations(folder) as operations:
            for _ in open_source([str(folder)]).part(number, parts):
                pass
        opened.append(sum(operation.startswith("open ") for operation in operations))
        asked.append(len(operations))
    return {
        f"prepare --part I/{parts}: most opened files, for a file of the source": max(opened) / files,
        f"prepare --part I/{parts}: most file operations, for a file of the source": max(asked) / files,
    }


def _resident() -> float:
    """Bytes of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def _watching_open_files() -> Iterator[list[int]]:
    """The numbers of open files beside those of before, at each opening of a token file."""
    from data_pipeline import merge as module

    before, seen, opened = _open_files(), [0], module.TokenFile

    class Watched(opened):  # type: ignore[misc, valid-type]
        def __init__(self, prefix: Path):
            super().__init__(prefix)
            seen.append(_open_files() - before)

    with patch.object(module, "TokenFile", Watched):
        yield seen


@contextmanager
def _few_files() -> Iterator[None]:
    """Linux's usual limits of open files: 1,024, which a process may raise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

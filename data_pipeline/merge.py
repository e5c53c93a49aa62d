"""Several prepared folders to one: the token files one after the other, with one index."""

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from data_pipeline.manifest import FileRecord, Manifest, ScoredRecord, SplitRecord, check_same_tokenizer
from data_pipeline.partial_folder import PartialFolder, resumable_folder
from data_pipeline.source_names import is_prepared
from data_pipeline.token_files import TokenFile, scored_prefix, write_index
from data_pipeline.verification import check_unchanged, verify_tokenizer
from megakernel.config.errors import UserError, report_write_errors

CHUNK = 2**24
"""Bytes that are copied at once."""

SAVED_BYTES = 2**32
"""Progress is saved after this many bytes."""


class _Part(NamedTuple):
    """A file of a folder that is merged, and the whole that it becomes a part of."""

    source: Path
    expected: FileRecord
    whole: str
    """Name of the merged file."""


def merge(folders: Sequence[Path], out: Path, *, overwrite: bool, console: Console) -> Manifest | None:
    """Merge prepared folders into `out`; None if they were merged into it before.

    Every file is compared with its manifest while it is copied. The folder appears complete or not at all; if the
    process is ended, the same command goes on after the last 4 GB. Documents keep the split that they are in. Raises
    UserError for folders that do not belong together.
    """
    manifests = {folder: _read(folder) for folder in folders}
    if len(manifests) < 2:
        raise UserError(f"{folders[0]} is the only folder; give two or more")
    places = [folder.resolve() for folder in folders]
    if twice := [folder for folder, place in zip(folders, places) if places.count(place) > 1]:
        raise UserError(f"{twice[0]} is given twice; its documents would be, too")
    first = manifests[folders[0]]
    for folder, manifest in manifests.items():
        _check_alike(folders[0], first, folder, manifest)
        try:
            verify_tokenizer(folder, manifest)
        except UserError as error:
            raise UserError(f"{folder} {error}; copy it from where it was prepared") from None
    arguments = {
        "merged": [
            {"folder": str(folder.resolve()), **{s: r.bin.sha256 for s, r in manifest.splits.items()}}
            for folder, manifest in manifests.items()
        ]
    }
    if out.exists():
        if not is_prepared(out):
            raise UserError(f"--out {out} exists and is not a prepared folder; choose another --out")
        if out.resolve() in places:
            raise UserError(f"--out {out} is one of the folders that are merged; choose another --out")
        if not overwrite:
            existing = Manifest.read(out)
            if existing.arguments != arguments:
                raise UserError(f"--out {out} has other content; choose another --out, or add --overwrite")
            check_unchanged(out, existing)
            return None
    with (
        report_write_errors("--out", out),
        resumable_folder(out, arguments, overwrite=overwrite, console=console) as partial,
    ):
        copied = _copy(list(_parts(manifests)), partial, console)
        splits = {split: _finish(partial.path, split, manifests, copied) for split in _splits(manifests)}
        # Of conversations all folders have one template, which is with the tokenizer.
        shutil.copytree(folders[0] / "tokenizer", partial.path / "tokenizer", dirs_exist_ok=True)
        merged = first.model_copy(
            update={
                "source": {"kind": "merged folders", "folders": len(manifests)},
                "arguments": arguments,
                "splits": splits,
                "skipped": _sums(manifest.skipped for manifest in manifests.values()),
                "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            }
        )
        merged.write(partial.path)
    _report(out, merged, manifests, console)
    return merged


def _read(folder: Path) -> Manifest:
    manifest = Manifest.read(folder)
    if manifest.labels is not None:
        raise UserError(
            f"{folder} has a class for every document; prepare all labelled sources with one `megakernel prepare`"
        )
    return manifest


def _check_alike(first_folder: Path, first: Manifest, folder: Path, manifest: Manifest) -> None:
    check_same_tokenizer(folder, manifest.tokenizer, first_folder, first.tokenizer, first_folder)
    if manifest.chat_template != first.chat_template:
        raise UserError(
            f"{folder} has chat template {manifest.chat_template}, and {first_folder} has {first.chat_template}; "
            "prepare both with the same options"
        )
    for split, record in manifest.splits.items():
        if split in first.splits and (record.scored is None) != (first.splits[split].scored is None):
            with_answers, without = (
                (first_folder, folder) if record.scored is None else (folder, first_folder)
            )
            raise UserError(
                f"{with_answers} says which tokens of its {split} split are answers, and {without} does not; list both "
                "in data.train instead"
            )


def _splits(manifests: dict[Path, Manifest]) -> list[str]:
    return list(dict.fromkeys(split for manifest in manifests.values() for split in manifest.splits))


def _parts(manifests: dict[Path, Manifest]) -> Iterator[_Part]:
    """All files with tokens, in the order of the folders."""
    for split in _splits(manifests):
        for folder, manifest in manifests.items():
            if (record := manifest.splits.get(split)) is None:
                continue
            yield _Part(folder / f"{split}.bin", record.bin, f"{split}.bin")
            if record.scored is not None:
                yield _Part(folder / f"{split}.scored.bin", record.scored.bin, f"{split}.scored.bin")


def _copy(parts: Sequence[_Part], partial: PartialFolder, console: Console) -> dict[str, int]:
    """Copy the parts, each compared with its manifest; returns the size of each whole.

    Saved are the number of finished parts and the sizes of the wholes then: a whole is cut to its size to go on.
    """
    done: int = 0
    sizes: dict[str, int] = {}
    if partial.saved is not None:
        done, sizes = partial.saved["done"], dict(partial.saved["sizes"])
        console.print(
            f"goes on from {partial.path}: {done:,} of {len(parts):,} files are copied", soft_wrap=True
        )
        for name, size in sizes.items():
            os.truncate(partial.path / name, size)
    total, since = sum(part.expected.size for part in parts), 0
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("copies", total=total, completed=sum(sizes.values()))
        for number, part in enumerate(parts[done:], start=done + 1):
            _append(part, partial.path / part.whole, sizes.get(part.whole, 0))
            sizes[part.whole] = sizes.get(part.whole, 0) + part.expected.size
            since += part.expected.size
            progress.advance(task, part.expected.size)
            if since >= SAVED_BYTES:
                partial.save({"done": number, "sizes": sizes})
                since = 0
    return sizes


def _append(part: _Part, whole: Path, size: int) -> None:
    """Write a file behind the first `size` bytes of `whole`."""
    digest, copied = hashlib.sha256(), 0
    try:
        source = part.source.open("rb")
    except OSError as error:
        raise UserError(
            f"{part.source} cannot be read ({error.strerror}); prepare its folder again"
        ) from None
    with source, whole.open("r+b" if size else "wb") as target:
        target.seek(size)
        while chunk := source.read(CHUNK):
            digest.update(chunk)
            target.write(chunk)
            copied += len(chunk)
        target.truncate()
        target.flush()
        os.fdatasync(target.fileno())
    if FileRecord(size=copied, sha256=digest.hexdigest()) != part.expected:
        raise UserError(
            f"{part.source} is not what its manifest.json records; copy its folder from where it was prepared, or "
            "prepare it again"
        )


def _finish(folder: Path, split: str, manifests: dict[Path, Manifest], sizes: dict[str, int]) -> SplitRecord:
    """Write the indices of a split; returns its record."""
    of_split = {place: m.splits[split] for place, m in manifests.items() if split in m.splits}
    records = list(of_split.values())
    files = {place: TokenFile(place / split) for place in of_split}
    lengths = np.concatenate([file.sequence_lengths for file in files.values()])
    dtype = next(iter(files.values())).dtype
    for place, file in files.items():
        if file.dtype != dtype or int(file.sequence_lengths.sum(dtype=np.int64)) != of_split[place].tokens:
            raise UserError(f"{place / split}.idx is not what its manifest.json records; prepare it again")
    assert sizes[f"{split}.bin"] == int(lengths.sum(dtype=np.int64)) * dtype.itemsize
    scored = None
    if all(record.scored is not None for record in records):
        tokens = sum(record.scored.tokens for record in records if record.scored is not None)
        scored = ScoredRecord(tokens=tokens, **write_index(scored_prefix(folder / split), lengths, np.uint8))
    known = [record.bytes for record in records if record.bytes is not None]
    return SplitRecord(
        documents=len(lengths),
        tokens=sum(record.tokens for record in records),
        bytes=sum(known) if len(known) == len(records) else None,
        scored=scored,
        **write_index(folder / split, lengths, dtype),
    )


def _sums(counts: Iterator[dict[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in counts:
        for reason, count in each.items():
            sums[reason] = sums.get(reason, 0) + count
    return sums


def _report(out: Path, merged: Manifest, manifests: dict[Path, Manifest], console: Console) -> None:
    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    say(f"{out}: {len(manifests)} folders, tokenizer {merged.tokenizer.kind}")
    for split, record in merged.splits.items():
        say(f"  {split}: {record.documents:,} documents, {record.tokens:,} tokens")
        missing = [folder for folder, manifest in manifests.items() if split not in manifest.splits]
        if missing:
            say(f"    {len(missing)} folders have no {split} split, the first: {missing[0]}")
    splits: dict[Any, Path] = {}
    for folder, manifest in manifests.items():
        key = (manifest.arguments.get("validation_fraction"), manifest.arguments.get("seed"))
        splits.setdefault(key, folder)
    if len(splits) > 1:
        one, other = list(splits.values())[:2]
        say(
            f"  {one} and {other} were split by other --validation-fraction or --seed: a document that is in both may "
            "be in train and in validation"
        )

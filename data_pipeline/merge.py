"""Several prepared folders to one: the token files one after the other, with one index."""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from data_pipeline.document import DOCUMENTS_PER_PAIR
from data_pipeline.manifest import (
    FileRecord,
    Manifest,
    ScoredRecord,
    SourcePart,
    SplitRecord,
    check_same_tokenizer,
)
from data_pipeline.partial_folder import PartialFolder, resumable_folder
from data_pipeline.source_names import is_prepared
from data_pipeline.token_files import HashingWriter, TokenFile, scored_prefix, write_index
from data_pipeline.verification import check_unchanged, verify_tokenizer
from megakernel.config.cluster import number_ranges
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
    process is ended, the same command goes on after the last 4 GB. Documents keep the split that they are in. The parts
    of one source (`prepare --part`) are merged in its order. Raises UserError for folders that do not belong together,
    and if a part is missing.
    """
    manifests = {folder: _read(folder) for folder in folders}
    if len(folders) < 2:
        raise UserError(f"{folders[0]} is the only folder; give two or more")
    places: dict[Path, Path] = {}
    for folder in folders:
        if places.setdefault(folder.resolve(), folder) is not folder:
            raise UserError(f"{folder} is given twice; its documents would be, too")
    manifests = _in_order_of_parts(manifests)
    first_folder, first = next(iter(manifests.items()))
    for folder, manifest in manifests.items():
        _check_alike(first_folder, first, folder, manifest)
    try:
        # The one that is copied. The others have its hash in their manifests; loading each would take hours.
        verify_tokenizer(first_folder, first)
    except UserError as error:
        raise UserError(f"{first_folder} {error}; copy it from where it was prepared") from None
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
        shutil.copytree(first_folder / "tokenizer", partial.path / "tokenizer", dirs_exist_ok=True)
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


def _in_order_of_parts(manifests: dict[Path, Manifest]) -> dict[Path, Manifest]:
    """The folders, those of each source that was prepared in parts in the order of the parts.

    Raises UserError unless each part is there once, of the same files.
    """
    sources: dict[Any, dict[int, Path]] = {}
    for folder, manifest in manifests.items():
        if (part := SourcePart.of(manifest)) is None:
            continue
        parts = sources.setdefault(part.source, {})
        if (other := parts.setdefault(part.number, folder)) is not folder:
            raise UserError(f"{folder} and {other} are both part {part}; leave one out")
    for (_, count), parts in sources.items():
        if missing := [number for number in range(count) if number not in parts]:
            first, ranges = next(iter(parts.values())), number_ranges(missing)
            same_count = [one for one in sources if one[1] == count]
            why = "" if len(same_count) == 1 else ", because the source's files changed between the parts"
            raise UserError(
                f"{first} is one of {count} parts of a source, and part {ranges} is not given{why}; prepare it with "
                f"--part {missing[0]}/{count}, or name its folder"
            )
    ordered: dict[Path, Manifest] = {}
    for folder, manifest in manifests.items():
        part = SourcePart.of(manifest)
        of_source = {0: folder} if part is None else sources[part.source]
        for number in sorted(of_source):
            ordered.setdefault(of_source[number], manifests[of_source[number]])
    return ordered


def _check_alike(first_folder: Path, first: Manifest, folder: Path, manifest: Manifest) -> None:
    check_same_tokenizer(folder, manifest.tokenizer, first_folder, first.tokenizer, first_folder)
    if manifest.chat_template != first.chat_template:
        raise UserError(
            f"{folder} has chat template {manifest.chat_template}, and {first_folder} has {first.chat_template}; "
            "prepare both with the same options"
        )
    if manifest.pairs != first.pairs:
        pairs, texts = (folder, first_folder) if manifest.pairs else (first_folder, folder)
        raise UserError(
            f"{pairs} holds pairs of a text and its translation, and {texts} does not; merge pairs with pairs"
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


def _copy(parts: Sequence[_Part], partial: PartialFolder, console: Console) -> dict[str, FileRecord]:
    """Copy the parts, each compared with its manifest; returns the record of each whole.

    Saved are the number of finished parts and the sizes of the wholes then: to go on, a whole is cut to its size, and
    read once for its checksum.
    """
    done: int = 0
    sizes: dict[str, int] = {}
    if partial.saved is not None:
        done, sizes = partial.saved["done"], dict(partial.saved["sizes"])
        console.print(
            f"goes on from {partial.path}: {done:,} of {len(parts):,} files are copied", soft_wrap=True
        )
    total, since = sum(part.expected.size for part in parts), 0
    with (
        ExitStack() as stack,
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("copies", total=total, completed=sum(sizes.values()))
        wholes: dict[str, HashingWriter] = {}
        for name in dict.fromkeys(part.whole for part in parts):
            path = partial.path / name
            stream = path.open("r+b" if sizes.get(name) else "w+b")
            wholes[name] = stack.enter_context(HashingWriter(stream, sizes.get(name, 0)))
        for number, part in enumerate(parts[done:], start=done + 1):
            _append(part, wholes[part.whole])
            since += part.expected.size
            bar.advance(task, part.expected.size)
            if since >= SAVED_BYTES:
                partial.save(
                    {"done": number, "sizes": {name: whole.save() for name, whole in wholes.items()}}
                )
                since = 0
        for whole in wholes.values():
            whole.save()
    return {name: whole.record for name, whole in wholes.items()}


def _append(part: _Part, whole: HashingWriter) -> None:
    """Copy a file to the end of its whole."""
    digest, copied = hashlib.sha256(), 0
    try:
        source = part.source.open("rb")
    except OSError as error:
        raise UserError(
            f"{part.source} cannot be read ({error.strerror}); prepare its folder again"
        ) from None
    with source:
        while chunk := source.read(CHUNK):
            digest.update(chunk)
            whole.write(chunk)
            copied += len(chunk)
    if FileRecord(size=copied, sha256=digest.hexdigest()) != part.expected:
        raise UserError(
            f"{part.source} is not what its manifest.json records; copy its folder from where it was prepared, or "
            "prepare it again"
        )


def _finish(
    folder: Path, split: str, manifests: dict[Path, Manifest], copied: dict[str, FileRecord]
) -> SplitRecord:
    """Write the indices of a split; returns its record."""
    of_split = {place: m.splits[split] for place, m in manifests.items() if split in m.splits}
    records = list(of_split.values())
    lengths = np.empty(sum(record.documents for record in records), np.int32)
    dtype, end = None, 0
    for place, record in of_split.items():
        file = TokenFile(
            place / split
        )  # closed before the next one: a process may open 1,024 files, often no more
        dtype = dtype or file.dtype
        of_file = file.sequence_lengths
        is_as_recorded = len(of_file) == record.documents and of_file.sum(dtype=np.int64) == record.tokens
        if file.dtype != dtype or not is_as_recorded:
            raise UserError(f"{place / split}.idx is not what its manifest.json records; prepare it again")
        lengths[end : end + record.documents] = of_file
        end += record.documents
    assert dtype is not None
    tokens = copied[f"{split}.bin"]
    assert tokens.size == int(lengths.sum(dtype=np.int64)) * dtype.itemsize
    scored = None
    if all(record.scored is not None for record in records):
        answers = sum(record.scored.tokens for record in records if record.scored is not None)
        index = write_index(scored_prefix(folder / split), lengths, np.uint8)
        scored = ScoredRecord(tokens=answers, bin=copied[f"{split}.scored.bin"], idx=index)
    known = [record.bytes for record in records if record.bytes is not None]
    return SplitRecord(
        documents=len(lengths),
        tokens=sum(record.tokens for record in records),
        bytes=sum(known) if len(known) == len(records) else None,
        scored=scored,
        bin=tokens,
        idx=write_index(folder / split, lengths, dtype),
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
        documents = f"{record.documents:,} documents"
        if merged.pairs:
            documents = f"{record.documents // DOCUMENTS_PER_PAIR:,} pairs"
        say(f"  {split}: {documents}, {record.tokens:,} tokens")
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

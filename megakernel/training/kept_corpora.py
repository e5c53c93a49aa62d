"""Which texts a run reads, by their hashes: a corpus that was prepared again is another one under the same path."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_pipeline.corpus import Corpora, PreparedCorpus
from megakernel.config import UserError

from .run_folder import write_atomically

FILE = "corpora.json"
"""In the run's folder: split -> corpus as the configuration names it -> tokens and SHA-256 of its files' hashes."""


def keep(folder: Path, corpora: Corpora, *, began: bool, evaluates: bool) -> list[str]:
    """Record the corpora in the run's folder; on rank 0. Returns a warning for each with other validation texts.

    began: whether steps of the run have succeeded, whose texts the record then has; a run of an earlier version has no
    record and begins one.
    Raises UserError if a corpus has other training texts than in the steps that are done.
    """
    file, warnings = folder / FILE, []
    known = _recorded(file) if began and file.exists() else {}
    found: dict[str, dict[str, Any]] = {"train": {}, "validation": {}}
    for split, corpus in _read(corpora, evaluates):
        if (digest := _digest(corpus, split)) is None:
            continue
        now = {"tokens": corpus.record(split).tokens, "sha256": digest}
        before = known.get(split, {}).get(str(corpus), now)
        counts = f"{before['tokens']:,} tokens then, {now['tokens']:,} now"
        if before["sha256"] != digest and split == "train":
            raise UserError(
                f"data.train={corpus} has other texts than when the run began ({counts}); restore it, choose another "
                f"run.name, or remove {file} to read these from here on"
            )
        if before["sha256"] != digest:
            warnings.append(
                f"warning: {corpus} has other validation texts than at the last start ({counts}); losses before and "
                "after do not compare"
            )
        found[split][str(corpus)] = now
    merged = {split: known.get(split, {}) | texts for split, texts in found.items()}
    write_atomically(file, json.dumps(merged, indent=2) + "\n")
    return warnings


def _recorded(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError:
        raise UserError(f"{file} is damaged; remove it to read the corpora as they are now") from None


def _read(corpora: Corpora, evaluates: bool) -> Iterator[tuple[str, PreparedCorpus]]:
    for stage in corpora.stages:
        yield from (("train", corpus) for corpus in stage)
    if evaluates:
        yield from (("validation", corpus) for corpus in corpora.of_split("validation"))


def _digest(corpus: PreparedCorpus, split: str) -> str | None:
    """SHA-256 of the hashes of the split's files; None: they are not known (Megatron's files with data.verify off)."""
    hashes = [file.sha256 for file in corpus.files(split).values()]
    return hashlib.sha256("".join(hashes).encode()).hexdigest() if all(hashes) else None

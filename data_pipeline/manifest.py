"""manifest.json: what a prepared folder holds, and how it was made."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from data_pipeline.document import Label
from megakernel.config.errors import UserError

FILE = "manifest.json"
FORMAT = 1


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(_Record):
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str

    @staticmethod
    def of(file: Path, look: Callable[[bytes], None] | None = None) -> "FileRecord":
        """The record of a file as it is now; reads all of it. look: called with what is read, 1 MiB at a time."""
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while chunk := stream.read(2**20):
                digest.update(chunk)
                if look is not None:
                    look(chunk)
        return FileRecord(size=file.stat().st_size, sha256=digest.hexdigest())


class ScoredRecord(_Record):
    """SPLIT.scored.bin and .idx: a byte for each token, 1 where it belongs to an answer."""

    tokens: int
    """Those that do."""

    bin: FileRecord
    idx: FileRecord


class SplitRecord(_Record):
    """One split: what is in it, and its two files."""

    documents: int

    tokens: int
    """The end of each document included, and its BOS where it has one."""

    bytes: int
    """Of text, in UTF-8."""

    bin: FileRecord
    idx: FileRecord

    scored: ScoredRecord | None = None
    """Which tokens belong to answers; None where the source knows of none."""


class TokenizerRecord(_Record):
    """The tokenizer in `tokenizer/`; `hash` is `Tokenizer.hash`."""

    kind: str
    vocab_size: int
    eod: int
    hash: str

    bos: int | None = None
    """What every document begins with; None: nothing, as in folders of earlier versions, which do not say so."""


class LabelsRecord(_Record):
    """The classes of a labelled corpus."""

    documents: int
    """Documents per example, one after the other in the token files."""

    classes: list[Label]
    """Class i as the source names it; none where labels are numbers to predict."""

    files: dict[str, FileRecord]
    """SPLIT.labels.npy by split."""


class Manifest(_Record):
    """Everything known about a prepared folder without opening its token files."""

    format: int = FORMAT
    source: dict[str, Any]
    """Kind of the source and what names it."""

    arguments: dict[str, Any]
    """What `megakernel prepare` was told; equal arguments need not be prepared again."""

    tokenizer: TokenizerRecord
    splits: dict[str, SplitRecord]
    """`train`, `validation`, and what else the source has; a split without documents is absent."""

    labels: LabelsRecord | None = None
    """None where documents have no labels."""

    chat_template: str | None = None
    """SHA-256 of what conversations were rendered by: tokens that are not scored count in no loss. None: texts."""

    skipped: dict[str, int]
    """Documents that are in no split, by reason."""

    versions: dict[str, str]
    created: str

    def files(self, split: str) -> dict[str, FileRecord]:
        """Name -> record of every file of a split."""
        record = self.splits[split]
        files = {f"{split}.bin": record.bin, f"{split}.idx": record.idx}
        if record.scored is not None:
            files |= {f"{split}.scored.bin": record.scored.bin, f"{split}.scored.idx": record.scored.idx}
        if self.labels is not None:
            files[f"{split}.labels.npy"] = self.labels.files[split]
        return files

    def write(self, folder: Path) -> None:
        """Write `folder`/manifest.json."""
        (folder / FILE).write_text(self.model_dump_json(indent=2) + "\n")

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """The manifest of `folder`; UserError where it is missing or not one of ours."""
        if not folder.is_dir():
            raise UserError(f"{folder} does not exist; make it with `megakernel prepare --out {folder}`")
        if not (folder / FILE).is_file():
            raise UserError(
                f"{folder} has no {FILE}, so `megakernel prepare` did not make it; "
                "give a prepared folder, or prepare its text"
            )
        text = (folder / FILE).read_bytes()
        if (found := re.search(rb'"format":\s*(\d+)', text)) and int(found[1]) != FORMAT:
            raise UserError(
                f"{folder / FILE} is of format {int(found[1])}, which this version cannot read ({FORMAT}); prepare the "
                "folder again"
            )
        try:
            return Manifest.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise UserError(
                f"{folder / FILE} is damaged ({place}: {first['msg']}); prepare the folder again"
            ) from error

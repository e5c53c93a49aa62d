"""manifest.json: the contents of a prepared folder, and how it was made."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

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
    def of(file: Path, on_chunk: Callable[[bytes], None] | None = None) -> "FileRecord":
        """The record of a file as it is now; reads all of it. on_chunk: called with each chunk of up to 1 MiB."""
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while chunk := stream.read(2**20):
                digest.update(chunk)
                if on_chunk is not None:
                    on_chunk(chunk)
        return FileRecord(size=file.stat().st_size, sha256=digest.hexdigest())


class ScoredRecord(_Record):
    """SPLIT.scored.bin and .idx: one byte per token, 1 if it belongs to an answer."""

    tokens: int
    """Number of tokens of answers."""

    bin: FileRecord
    idx: FileRecord


class SplitRecord(_Record):
    """The counts and files of one split."""

    documents: int

    tokens: int
    """Number of tokens, with the end-of-document and BOS tokens."""

    bytes: int | None
    """UTF-8 bytes of text; None: unknown, for token files that `prepare` did not write."""

    bin: FileRecord
    idx: FileRecord

    scored: ScoredRecord | None = None
    """Which tokens belong to answers; None if the source has no answers."""


class TokenizerRecord(_Record):
    """The tokenizer in `tokenizer/`; `hash` is `Tokenizer.hash`."""

    kind: str
    vocab_size: int
    eod: int
    hash: str

    bos: int | None = None
    """The token that every document begins with; None: no token, as in all folders of earlier versions."""

    @model_validator(mode="after")
    def _ids_are_in_the_vocabulary(self) -> "TokenizerRecord":
        for name in ("eod", "bos"):
            if (token := getattr(self, name)) is not None and not 0 <= token < self.vocab_size:
                raise ValueError(f"{name}={token} is none of the {self.vocab_size} ids")
        return self


def check_same_tokenizer(
    place: object, own: TokenizerRecord, first_place: object, first: TokenizerRecord, folder: Path
) -> None:
    """Raise UserError unless two corpora have one tokenizer and begin documents alike.

    place, first_place: what errors call them. folder: the first one's, which has its tokenizer.
    """
    if own.hash != first.hash:
        raise UserError(
            f"{place} was prepared with another tokenizer ({own.kind}, {own.vocab_size} ids) than {first_place} "
            f"({first.kind}, {first.vocab_size} ids); prepare it with --tokenizer {folder / 'tokenizer'}"
        )
    if own.bos != first.bos:
        flag = "--no-add-bos" if first.bos is None else "--add-bos"
        raise UserError(
            f"{place} begins documents with token {own.bos}, {first_place} with {first.bos} (None: no BOS); prepare it "
            f"with {flag}"
        )


class LabelsRecord(_Record):
    """The classes of a labeled corpus."""

    documents: int
    """Documents per example, consecutive in the token files."""

    classes: list[Label]
    """The source's name of class i; empty for a regression."""

    files: dict[str, FileRecord]
    """Split -> record of SPLIT.labels.npy."""


@dataclass(frozen=True)
class SourcePart:
    """Which part of a source's files a folder was prepared from (`prepare --part NUMBER/COUNT`)."""

    number: int
    """From 0 on."""

    count: int

    files: str
    """SHA-256 of the paths, sizes and times of change of the files of all parts."""

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def source(self) -> tuple[str, int]:
        """Equal for the parts that belong together."""
        return self.files, self.count

    @staticmethod
    def of(manifest: "Manifest") -> "SourcePart | None":
        """The part that a folder holds; None for a whole source."""
        return SourcePart(**manifest.source["part"]) if "part" in manifest.source else None


class Manifest(_Record):
    """Everything known about a prepared folder without opening its token files."""

    format: int = FORMAT
    source: dict[str, Any]
    """Kind and identity of the source."""

    arguments: dict[str, Any]
    """The arguments of `megakernel prepare`; equal arguments need not be prepared again."""

    tokenizer: TokenizerRecord
    splits: dict[str, SplitRecord]
    """`train`, `validation`, and other splits of the source; a split without documents is absent."""

    labels: LabelsRecord | None = None
    """None if documents have no labels."""

    pairs: bool = False
    """Whether every two documents are a text and its translation; so in no folder of earlier versions."""

    chat_template: str | None = None
    """SHA-256 of the template that rendered conversations, in which only scored tokens count; None: plain texts."""

    skipped: dict[str, int]
    """Number of skipped documents by reason."""

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
        (folder / FILE).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """The manifest of `folder`; UserError if it is missing or invalid."""
        if not folder.is_dir():
            raise UserError(
                f"{folder} does not exist; make it with `megakernel prepare --source FOLDER --tokenizer byte --out "
                f"{folder}`, where FOLDER has your text"
            )
        if not (folder / FILE).is_file():
            raise UserError(
                f"{folder} has no {FILE}, so `megakernel prepare` did not make it; "
                "give a prepared folder, or prepare its text"
            )
        text = (folder / FILE).read_bytes()
        if (match := re.search(rb'"format":\s*(\d+)', text)) and int(match[1]) != FORMAT:
            raise UserError(
                f"{folder / FILE} is of format {int(match[1])}, which this version cannot read ({FORMAT}); prepare the "
                "folder again"
            )
        try:
            return Manifest.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "the file"
            raise UserError(
                f"{folder / FILE} is damaged ({field}: {first['msg']}); prepare the folder again"
            ) from error

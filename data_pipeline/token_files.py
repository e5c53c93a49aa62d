"""Megatron token files: `PREFIX.bin` holds the tokens, `PREFIX.idx` where each document lies.

They are read and written here: Megatron's import takes seconds, and its writer 200 bytes of memory for each document.
"""

import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_pipeline.document import Label
from data_pipeline.encoding import Encoded
from data_pipeline.manifest import FileRecord, ScoredRecord, SplitRecord

INDEX_MAGIC = b"MMIDIDX\x00\x00"

INDEX_HEADER = struct.Struct("<9sQBQQ")
"""Magic and version of Megatron's index, then type code, number of sequences and of document bounds."""

_DTYPES = dict(enumerate(("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"), 1))
"""By Megatron's type code."""


class TokenFile:
    """The documents of one split, mapped: only what is asked for comes from the disk."""

    def __init__(self, prefix: Path):
        """prefix: path of both files without their endings, which have been checked."""
        self._prefix = prefix
        index = np.memmap(f"{prefix}.idx", dtype=np.uint8, mode="r")
        _, _, code, count, _ = INDEX_HEADER.unpack(index[: INDEX_HEADER.size].tobytes())
        self.sequence_lengths = np.frombuffer(index, np.int32, count, INDEX_HEADER.size)
        """Tokens of each document."""

        self._places = np.frombuffer(index, np.int64, count, INDEX_HEADER.size + self.sequence_lengths.nbytes)
        self._tokens = np.memmap(f"{prefix}.bin", dtype=_DTYPES[code], mode="r")

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile, (self._prefix,)  # not the tokens

    def __len__(self) -> int:
        """Documents."""
        return len(self.sequence_lengths)

    def __getitem__(self, document: int) -> np.ndarray:
        """All tokens of a document."""
        return self.get(document, offset=0, length=int(self.sequence_lengths[document]))

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[document] for document in range(len(self)))

    def get(self, document: int, offset: int, length: int) -> np.ndarray:
        """So many tokens of a document, from `offset` on."""
        start = int(self._places[document]) // self._tokens.itemsize + offset
        return self._tokens[start : start + length]


def token_dtype(vocab_size: int) -> type[Any]:
    """The numpy integer type that Megatron writes for ids below `vocab_size`."""
    return np.uint16 if vocab_size < 65_500 else np.int32


def scored_prefix(prefix: Path) -> Path:
    """Path, without endings, of the files that say which tokens of `prefix` belong to answers."""
    return prefix.with_name(f"{prefix.name}.scored")


class TokenWriter:
    """Writes one split; a split without documents gets no files, for empty ones cannot be memory-mapped.

    Where answers are known, `PREFIX.scored.bin` and `.idx` say of each token whether it belongs to one.
    """

    def __init__(self, prefix: Path, dtype: type[Any]):
        """prefix: path of both files without their endings."""
        self.documents = 0
        self.labels: list[Label | float] = []
        self.tokens = 0
        self._bytes = 0
        self._scored_tokens = 0
        self._of_tokens = _Documents(prefix, dtype)
        self._of_answers = _Documents(scored_prefix(prefix), np.uint8)

    def add(self, encoded: Encoded) -> None:
        """Append documents."""
        for tokens in encoded.tokens:
            self._of_tokens.add(tokens)
            self.tokens += tokens.size
        for flags in encoded.scored:
            self._of_answers.add(flags)
            self._scored_tokens += int(flags.sum())
        self.documents += len(encoded.tokens)
        self.labels += encoded.labels
        self._bytes += encoded.bytes

    def finish(self) -> SplitRecord:
        """Write the index; the split has a document."""
        scored = None
        if self._of_answers.begun:
            scored = ScoredRecord(tokens=self._scored_tokens, **self._of_answers.finish())
        return SplitRecord(
            documents=self.documents,
            tokens=self.tokens,
            bytes=self._bytes,
            scored=scored,
            **self._of_tokens.finish(),
        )


class _Documents:
    """A pair of files of Megatron's, made with the first document."""

    def __init__(self, prefix: Path, dtype: type[Any]):
        self._prefix = prefix
        self._dtype = np.dtype(dtype)
        self._stream: BinaryIO | None = None
        self._lengths = array("i")

    @property
    def begun(self) -> bool:
        return self._stream is not None

    def add(self, document: np.ndarray) -> None:
        if self._stream is None:
            self._stream = open(f"{self._prefix}.bin", "wb")  # noqa: SIM115 - `finish` closes it
        self._stream.write(document.astype(self._dtype, copy=False).data)
        self._lengths.append(document.size)

    def finish(self) -> dict[str, FileRecord]:
        """Write the index; both files' records."""
        assert self._stream is not None
        self._stream.close()
        lengths = np.frombuffer(self._lengths, np.int32)
        with open(f"{self._prefix}.idx", "wb") as stream:
            code = next(code for code, name in _DTYPES.items() if name == self._dtype.name)
            stream.write(INDEX_HEADER.pack(INDEX_MAGIC, 1, code, len(lengths), len(lengths) + 1))
            stream.write(lengths.data)
            starts = lengths.cumsum(dtype=np.int64)
            starts -= lengths
            starts *= self._dtype.itemsize
            stream.write(starts.data)
            # Documents are one sequence each.
            stream.write(np.arange(len(lengths) + 1, dtype=np.int64).data)
        return {kind: FileRecord.of(Path(f"{self._prefix}.{kind}")) for kind in ("bin", "idx")}

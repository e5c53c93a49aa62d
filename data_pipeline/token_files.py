"""Megatron token files: `PREFIX.bin` holds the tokens, `PREFIX.idx` the offsets of the documents.

Read and written without Megatron, whose import takes seconds and whose writer takes 200 bytes of memory per document.
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
"""Megatron's index header: magic, version, type code, number of sequences, number of document bounds."""

DTYPE_NAMES = dict(enumerate(("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"), 1))
"""Megatron's type code -> numpy name."""


def token_file(prefix: Path, kind: str) -> Path:
    """PREFIX.bin or PREFIX.idx, as `kind` says; a prefix may hold dots."""
    return prefix.with_name(f"{prefix.name}.{kind}")


class TokenFile:
    """The memory-mapped documents of one split."""

    def __init__(self, prefix: Path):
        """prefix: path of both files, already checked, without the extensions."""
        self._prefix = prefix
        index = np.memmap(token_file(prefix, "idx"), dtype=np.uint8, mode="r")
        _, _, code, count, bounds = INDEX_HEADER.unpack(index[: INDEX_HEADER.size].tobytes())
        self.sequence_lengths = np.frombuffer(index, np.int32, count, INDEX_HEADER.size)
        """Tokens of each document."""

        self._starts = np.frombuffer(index, np.int64, count, INDEX_HEADER.size + 4 * count)
        self._tokens = np.memmap(token_file(prefix, "bin"), dtype=DTYPE_NAMES[code], mode="r")
        if (
            bounds != count + 1
        ):  # documents of several sequences, as `preprocess_data.py --split-sentences` writes
            self._join_sequences(np.frombuffer(index, np.int64, bounds, INDEX_HEADER.size + 12 * count))

    def _join_sequences(self, bounds: np.ndarray) -> None:
        """Make documents of sequences; bounds (documents + 1,): first sequence of each, then the number of all."""
        ends = np.concatenate([[0], self.sequence_lengths.cumsum(dtype=np.int64)])
        lengths = np.diff(ends[bounds])
        assert lengths.max() < 2**31, "Megatron's indices hold lengths as int32"
        self.sequence_lengths = lengths.astype(np.int32)
        self._starts = ends[bounds[:-1]] * self._tokens.itemsize

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile, (self._prefix,)  # reopened, not pickled with its tokens

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.sequence_lengths)

    def __getitem__(self, document: int) -> np.ndarray:
        """All tokens of a document."""
        return self.get(document, offset=0, length=int(self.sequence_lengths[document]))

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[document] for document in range(len(self)))

    def get(self, document: int, offset: int, length: int) -> np.ndarray:
        """`length` tokens of a document from `offset` on."""
        start = int(self._starts[document]) // self._tokens.itemsize + offset
        return self._tokens[start : start + length]

    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """First and last token of each document that has tokens."""
        filled = self.sequence_lengths > 0
        firsts = self._starts[filled] // self._tokens.itemsize
        return self._tokens[firsts], self._tokens[firsts + self.sequence_lengths[filled] - 1]


def token_dtype(vocab_size: int) -> type[Any]:
    """The numpy integer type that Megatron writes for ids below `vocab_size`."""
    return np.uint16 if vocab_size < 65_500 else np.int32


def scored_prefix(prefix: Path) -> Path:
    """Path, without extensions, of the files that record which tokens of `prefix` belong to answers."""
    return prefix.with_name(f"{prefix.name}.scored")


class TokenWriter:
    """Writes one split; a split without documents gets no files, since empty ones cannot be memory-mapped.

    If answers are known, `PREFIX.scored.bin` and `.idx` record which tokens belong to them.
    """

    def __init__(self, prefix: Path, dtype: type[Any]):
        """prefix: path of both files without the extensions."""
        self.documents = 0
        self.labels: list[Label | float] = []
        self.tokens = 0
        self._bytes = 0
        self._scored_tokens = 0
        self._token_file = _DocumentWriter(prefix, dtype)
        self._scored_file = _DocumentWriter(scored_prefix(prefix), np.uint8)

    def add(self, encoded: Encoded) -> None:
        """Append documents."""
        for tokens in encoded.tokens:
            self._token_file.add(tokens)
            self.tokens += tokens.size
        for flags in encoded.scored:
            self._scored_file.add(flags)
            self._scored_tokens += int(flags.sum())
        self.documents += len(encoded.tokens)
        self.labels += encoded.labels
        self._bytes += encoded.bytes

    def finish(self) -> SplitRecord:
        """Write the index; returns the split's record. The split has a document."""
        scored = None
        if self._scored_file.has_documents:
            scored = ScoredRecord(tokens=self._scored_tokens, **self._scored_file.finish())
        return SplitRecord(
            documents=self.documents,
            tokens=self.tokens,
            bytes=self._bytes,
            scored=scored,
            **self._token_file.finish(),
        )


class _DocumentWriter:
    """A writer of one pair of Megatron files, created with the first document."""

    def __init__(self, prefix: Path, dtype: type[Any]):
        self._prefix = prefix
        self._dtype = np.dtype(dtype)
        self._stream: BinaryIO | None = None
        self._lengths = array("i")

    @property
    def has_documents(self) -> bool:
        return self._stream is not None

    def add(self, document: np.ndarray) -> None:
        if self._stream is None:
            self._stream = open(f"{self._prefix}.bin", "wb")  # noqa: SIM115 - `finish` closes it
        self._stream.write(document.astype(self._dtype, copy=False).data)
        self._lengths.append(document.size)

    def finish(self) -> dict[str, FileRecord]:
        """Write the index; returns both files' records."""
        assert self._stream is not None
        self._stream.close()
        lengths = np.frombuffer(self._lengths, np.int32)
        with open(f"{self._prefix}.idx", "wb") as stream:
            code = next(code for code, name in DTYPE_NAMES.items() if name == self._dtype.name)
            stream.write(INDEX_HEADER.pack(INDEX_MAGIC, 1, code, len(lengths), len(lengths) + 1))
            stream.write(lengths.data)
            starts = lengths.cumsum(dtype=np.int64)
            starts -= lengths
            starts *= self._dtype.itemsize
            stream.write(starts.data)
            # Document bounds: each document is one sequence.
            stream.write(np.arange(len(lengths) + 1, dtype=np.int64).data)
        return {kind: FileRecord.of(Path(f"{self._prefix}.{kind}")) for kind in ("bin", "idx")}

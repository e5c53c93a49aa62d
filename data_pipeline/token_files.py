"""Megatron token files: `PREFIX.bin` holds the tokens, `PREFIX.idx` the offsets of the documents.

Read and written without Megatron, whose import takes seconds and whose writer takes 200 bytes of memory per document.
"""

import hashlib
import json
import os
import struct
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_pipeline.document import Label
from data_pipeline.encoding import Encoded
from data_pipeline.manifest import FileRecord, ScoredRecord, SplitRecord
from megakernel.config.errors import UserError

INDEX_MAGIC = b"MMIDIDX\x00\x00"

INDEX_HEADER = struct.Struct("<9sQBQQ")
"""Megatron's index header: magic, version, type code, number of sequences, number of document bounds."""

INDEX_PIECE = 2**20
"""Documents of an index that are in memory at once."""

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

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens."""
        return self._tokens.dtype

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


class HashingWriter:
    """Writes a file and its checksum at once, so that nobody has to read it again for its record."""

    def __init__(self, stream: BinaryIO, size: int = 0):
        """stream: open for reading and writing. size: bytes that it keeps, which are read once; the rest is dropped.

        Raises UserError if the file has fewer.
        """
        self._stream = stream
        self._digest = hashlib.sha256()
        self.size = 0
        """Bytes of the file."""
        stream.seek(0)
        while self.size < size and (chunk := stream.read(min(_CHUNK, size - self.size))):
            self._digest.update(chunk)
            self.size += len(chunk)
        if self.size < size:
            stream.close()
            folder = Path(stream.name).parent
            raise UserError(f"{stream.name} is shorter than it was; delete {folder} to start anew")
        stream.truncate(size)
        stream.seek(size)

    @classmethod
    def create(cls, path: Path) -> "HashingWriter":
        """A writer of a new file."""
        return cls(path.open("w+b"))

    def __enter__(self) -> "HashingWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes, or an array's memory."""
        self.size += self._stream.write(data)
        self._digest.update(data)

    def save(self) -> int:
        """Flush to disk; returns the size."""
        self._stream.flush()
        os.fdatasync(self._stream.fileno())
        return self.size

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    @property
    def record(self) -> FileRecord:
        """Size and SHA-256 of what is in the file."""
        return FileRecord(size=self.size, sha256=self._digest.hexdigest())


_CHUNK = 2**20
"""Bytes that are read at once."""


class TokenWriter:
    """Writes one split; a split without documents gets no files, since empty ones cannot be memory-mapped.

    If answers are known, `PREFIX.scored.bin` and `.idx` record which tokens belong to them.
    """

    def __init__(self, prefix: Path, dtype: type[Any], saved: Mapping[str, Any] | None = None):
        """prefix: path of both files without the extensions. saved: what `save` returned, to go on after it."""
        state = dict.fromkeys(("documents", "tokens", "bytes", "scored_tokens", "labels"), 0) | dict(
            saved or {}
        )
        self.documents = state["documents"]
        self.tokens = state["tokens"]
        self._bytes = state["bytes"]
        self._scored_tokens = state["scored_tokens"]
        self._label_lines = prefix.with_name(f"{prefix.name}.labels.jsonl")
        self._saved_labels = state["labels"]
        self.labels: list[Label | float] = []
        if self._saved_labels:
            lines = self._label_lines.read_text(encoding="utf-8").splitlines()[: self._saved_labels]
            self.labels = [json.loads(line) for line in lines]
            self._label_lines.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        self._token_file = _DocumentWriter(prefix, dtype, state.get("token_file"))
        self._scored_file = _DocumentWriter(scored_prefix(prefix), np.uint8, state.get("scored_file"))

    def save(self) -> dict[str, Any]:
        """Write out what was added; returns what a later writer needs to go on from here, as JSON values."""
        with self._label_lines.open("a", encoding="utf-8") as stream:
            stream.writelines(f"{json.dumps(label)}\n" for label in self.labels[self._saved_labels :])
        self._saved_labels = len(self.labels)
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self._bytes,
            "scored_tokens": self._scored_tokens,
            "labels": self._saved_labels,
            "token_file": self._token_file.save(),
            "scored_file": self._scored_file.save(),
        }

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
        self._label_lines.unlink(missing_ok=True)
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

    def __init__(self, prefix: Path, dtype: type[Any], saved: list[int] | None = None):
        """saved: what `save` returned; documents that were added later are dropped."""
        self._prefix = prefix
        self._dtype = np.dtype(dtype)
        self._stream: HashingWriter | None = None
        self._lengths = array("i")
        self._saved = 0
        if saved is not None:
            self._saved, size = saved
            self._stream = HashingWriter(open(f"{prefix}.bin", "r+b"), size)  # noqa: SIM115 - `finish` closes it
            with open(f"{prefix}.lengths", "r+b") as lengths:
                lengths.truncate(self._saved * self._lengths.itemsize)
                self._lengths.fromfile(lengths, self._saved)

    def save(self) -> list[int] | None:
        """Write out what was added; returns the number of documents and of bytes, None without a document."""
        if self._stream is None:
            return None
        size = self._stream.save()
        with open(f"{self._prefix}.lengths", "ab") as lengths:
            self._lengths[self._saved :].tofile(lengths)
            lengths.flush()
            os.fdatasync(lengths.fileno())
        self._saved = len(self._lengths)
        return [self._saved, size]

    @property
    def has_documents(self) -> bool:
        return self._stream is not None

    def add(self, document: np.ndarray) -> None:
        if self._stream is None:
            self._stream = HashingWriter.create(Path(f"{self._prefix}.bin"))
        self._stream.write(document.astype(self._dtype, copy=False).data)
        self._lengths.append(document.size)

    def finish(self) -> dict[str, FileRecord]:
        """Write the index; returns both files' records."""
        assert self._stream is not None
        self._stream.close()
        Path(f"{self._prefix}.lengths").unlink(missing_ok=True)
        index = write_index(self._prefix, np.frombuffer(self._lengths, np.int32), self._dtype)
        return {"bin": self._stream.record, "idx": index}


def write_index(prefix: Path, lengths: np.ndarray, dtype: Any) -> FileRecord:
    """Write PREFIX.idx for documents of `lengths` int32 tokens in PREFIX.bin; returns its record."""
    dtype = np.dtype(dtype)
    with HashingWriter.create(Path(f"{prefix}.idx")) as stream:
        code = next(code for code, name in DTYPE_NAMES.items() if name == dtype.name)
        stream.write(INDEX_HEADER.pack(INDEX_MAGIC, 1, code, len(lengths), len(lengths) + 1))
        stream.write(lengths.data)
        end = 0
        for first in range(0, len(lengths), INDEX_PIECE):
            piece = lengths[first : first + INDEX_PIECE]
            ends = end + piece.cumsum(dtype=np.int64)
            stream.write(((ends - piece) * dtype.itemsize).data)
            end = int(ends[-1])
        # Document bounds: each document is one sequence.
        for first in range(0, len(lengths) + 1, INDEX_PIECE):
            stream.write(np.arange(first, min(first + INDEX_PIECE, len(lengths) + 1), dtype=np.int64).data)
    return stream.record

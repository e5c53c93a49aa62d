"""Megatron token files: `PREFIX.bin` holds the tokens, `PREFIX.idx` where each document lies."""

from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from data_pipeline.document import Label
from data_pipeline.encoding import Encoded
from data_pipeline.manifest import FileRecord, SplitRecord


def token_dtype(vocab_size: int) -> type[Any]:
    """The narrowest numpy integer type Megatron writes for ids below `vocab_size`."""
    return DType.optimal_dtype(vocab_size)


class TokenWriter:
    """Writes one split; a split without documents gets no files, for empty ones cannot be memory-mapped."""

    def __init__(self, prefix: Path, dtype: type[Any]):
        """prefix: path of both files without their endings."""
        self.documents = 0
        self.labels: list[Label] = []
        self.tokens = 0
        self._bytes = 0
        self._prefix = prefix
        self._dtype = dtype
        self._builder: IndexedDatasetBuilder | None = None

    def add(self, encoded: Encoded) -> None:
        """Append documents."""
        for tokens in encoded.tokens:
            if self._builder is None:
                self._builder = IndexedDatasetBuilder(f"{self._prefix}.bin", dtype=self._dtype)
            self._builder.add_document(tokens, [tokens.size])
            self.tokens += tokens.size
        self.documents += len(encoded.tokens)
        self.labels += encoded.labels
        self._bytes += encoded.bytes

    def finish(self) -> SplitRecord:
        """Write the index; the split has a document."""
        assert self._builder is not None
        self._builder.finalize(f"{self._prefix}.idx")
        return SplitRecord(
            documents=self.documents,
            tokens=self.tokens,
            bytes=self._bytes,
            bin=FileRecord.of(Path(f"{self._prefix}.bin")),
            idx=FileRecord.of(Path(f"{self._prefix}.idx")),
        )

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from data_pipeline.encoding import Encoded
from data_pipeline.token_files import TokenWriter, token_dtype


@pytest.mark.parametrize("vocab_size", [257, 65_499, 65_500, 250_000])
def test_the_files_equal_those_that_megatron_writes(tmp_path: Path, vocab_size: int):
    dtype = token_dtype(vocab_size)
    assert dtype is DType.optimal_dtype(vocab_size)
    draw = np.random.default_rng(0)
    documents = [draw.integers(vocab_size, size=size).astype(dtype) for size in (5, 1, 300, 2)]
    scored = [draw.integers(2, size=document.size).astype(np.uint8) for document in documents]
    writer = TokenWriter(tmp_path / "train", dtype)
    writer.add(Encoded(documents[:3], scored=scored[:3]))
    writer.add(Encoded(documents[3:], scored=scored[3:]))
    writer.finish()
    for name, arrays, kind in (("train", documents, dtype), ("train.scored", scored, np.uint8)):
        write_with_megatron(tmp_path / "megatron", arrays, kind)
        for ending in ("bin", "idx"):
            expected = (tmp_path / f"megatron.{ending}").read_bytes()
            assert (tmp_path / f"{name}.{ending}").read_bytes() == expected


def write_with_megatron(prefix: Path, documents: list[np.ndarray], dtype: type[Any]) -> None:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(document, [document.size])
    builder.finalize(f"{prefix}.idx")


def test_writing_needs_few_bytes_of_memory_per_document(tmp_path: Path):
    count = 100_000
    encoded = Encoded([np.zeros(400, dtype=np.uint16)] * 100)
    writer = TokenWriter(tmp_path / "train", np.uint16)
    tracemalloc.start()
    for _ in range(count // 100):
        writer.add(encoded)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    writer.finish()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 8 * count, "a corpus may have a billion documents"
    assert peak < 40 * count

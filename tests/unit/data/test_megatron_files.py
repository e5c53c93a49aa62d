"""Token files of Megatron's own tools as corpora."""

import logging
import os
import shutil
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from data_pipeline.corpus import Corpora
from data_pipeline.loader import TrainingBatches, ValidationBatches
from data_pipeline.manifest import FileRecord, Manifest
from data_pipeline.order import Share
from data_pipeline.tokenizers import train_bpe
from megakernel.config.data import Data
from megakernel.config.errors import UserError
from megakernel.config.tree import Config
from tests.unit.data.conftest import SEQ_LEN, documents

Configure = Callable[..., Config]


def write(prefix: Path, texts: list[list[int]], sentences: int = 1, dtype: Any = np.uint16) -> Path:
    """Token files as Megatron's `preprocess_data.py` writes them; sentences: sequences of each document."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for text in texts:
        parts = np.array_split(np.array(text), sentences)
        builder.add_document(np.concatenate(parts), [len(part) for part in parts])
    builder.finalize(f"{prefix}.idx")
    return prefix


def as_bytes(count: int, seed: int = 1) -> list[list[int]]:
    """Documents as bytes, each with the end-of-document token of the byte tokenizer."""
    return [[*text.encode(), 256] for text in documents(count, seed=seed)]


def data(train: Any, **keys: Any) -> Data:
    return Data(train=train, **{"tokenizer": "byte", **keys})


def error_of(train: Any, **keys: Any) -> str:
    with pytest.raises(UserError) as caught:
        Corpora(data(train, **keys), validation=False)
    return str(caught.value)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write(tmp_path / "web.v1_text_document", as_bytes(90))


@pytest.mark.parametrize("sentences", [1, 3])
def test_a_prefix_is_trained_on_as_prepared_text(tmp_path: Path, configure: Configure, sentences: int):
    texts = as_bytes(90)
    prefix = write(tmp_path / "web", texts, sentences)
    config = configure(prefix, steps=40, data={"tokenizer": "byte"}, eval_samples=0)
    batches = TrainingBatches(config, Corpora(config.data, validation=False), Share())
    read = next(batches.from_step(0))
    assert all(batch.tokens.shape == (2, SEQ_LEN) for batch in read)
    everything = np.concatenate(texts)
    for batch in read:
        for row, starts in zip(batch.tokens.tolist(), (batch.positions == 0).tolist()):
            ends = [0, *(at for at, start in enumerate(starts) if start), SEQ_LEN]
            for first, end in pairwise(ends):
                part = row[first:end]
                assert (
                    any(
                        everything[at : at + len(part)].tolist() == part
                        for at in np.flatnonzero(everything == part[0])
                    )
                    if part
                    else True
                )
            for at in np.flatnonzero(starts):
                assert at == 0 or row[at - 1] == 256, "documents are those of the index"
    assert [use.corpus for use in batches.use()] == [str(prefix)]


def test_documents_of_several_sequences_are_joined(tmp_path: Path):
    texts = as_bytes(20)
    for sentences in (1, 3):
        prefix = write(tmp_path / f"web-{sentences}", texts, sentences)
        [corpus] = Corpora(data(prefix), validation=False).train
        record = corpus.record("train")
        assert (record.documents, record.tokens) == (20, sum(map(len, texts)))
        assert corpus.manifest.source["sequences"] == 20 * sentences
        # The ends of documents are no bytes of text.
        assert record.bytes == record.tokens - 20


def test_a_manifest_is_made_on_first_use_and_the_files_are_read_once(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
):
    read: list[str] = []
    of = FileRecord.of
    monkeypatch.setattr(
        FileRecord, "of", staticmethod(lambda file, look=None: read.append(file.name) or of(file, look))
    )
    Corpora(data(prefix), validation=False, verify=False)
    assert read == [], "what is checked before a run's folder is made takes no time"
    Corpora(data(prefix), validation=False)
    assert read == [f"{prefix.name}.idx", f"{prefix.name}.bin"]
    manifest = Manifest.read(prefix.with_name(f"{prefix.name}.megakernel"))
    assert manifest.splits["train"].bin == of(prefix.with_name(f"{prefix.name}.bin"))
    again = Corpora(data(prefix), validation=False)
    assert len(read) == 2
    assert again.tokenizer.vocab_size == again.vocab_size == 257
    os.utime(prefix.with_name(f"{prefix.name}.bin"))
    Corpora(data(prefix), validation=False)
    assert len(read) == 4, "files that changed are read again"


def test_validation_needs_a_corpus_of_its_own(prefix: Path, tmp_path: Path, configure: Configure):
    with pytest.raises(UserError) as caught:
        Corpora(data(prefix))
    assert str(caught.value) == (
        f"data.train={prefix} are token files of Megatron, which have no validation split; set data.validation to the "
        "prefix of others or to a prepared folder, or training.eval_samples=0"
    )
    other = write(tmp_path / "held_out", as_bytes(30, seed=5))
    config = configure(prefix, data={"tokenizer": "byte", "validation": str(other)})
    corpora = Corpora(config.data)
    assert len(list(ValidationBatches(config, corpora, Share()))) == 3
    assert corpora.is_text("validation")
    assert corpora.bytes_per_token("validation") == pytest.approx(1, rel=0.05)
    with pytest.raises(UserError, match="which have no test split"):
        corpora.of_split("test")


def test_prefixes_and_prepared_folders_are_blended(prefix: Path, corpus: Path, configure: Configure):
    config = configure({str(prefix): 3, str(corpus): 1}, data={"tokenizer": "byte"}, eval_samples=0)
    batches = TrainingBatches(config, Corpora(config.data, validation=False), Share())
    assert [use.share for use in batches.use()] == [0.75, 0.25]
    unweighted = configure([str(prefix), str(corpus)], data={"tokenizer": "byte"}, eval_samples=0)
    opened = Corpora(unweighted.data, validation=False)
    assert [one.share("train") for one in opened.train] == [
        one.record("train").tokens for one in opened.train
    ]


def test_a_prefix_without_a_tokenizer_or_with_another_is_refused(prefix: Path, tmp_path: Path, corpus: Path):
    assert "do not name their tokenizer; set data.tokenizer to the one that made them" in error_of(
        prefix, tokenizer=None
    )
    assert error_of(corpus / "train", tokenizer=None).endswith(
        f"is a split of the prepared folder {corpus}; name the folder"
    )
    assert "would have to be trained" in error_of(prefix, tokenizer="bpe:300")
    assert "cannot be loaded" in error_of(prefix, tokenizer=str(tmp_path / "none"))
    large = write(tmp_path / "large", [[5, 300, 256]])
    assert error_of(large) == (
        f"data.train={large} holds the id 300, but data.tokenizer=byte has 257 ids; give the tokenizer that made it"
    )
    negative = write(tmp_path / "negative", [[5, -1, 256]], dtype=np.int32)
    assert "holds the id 4294967295" in error_of(negative)
    assert "is only for token files of Megatron" in error_of(corpus)
    assert not list(tmp_path.glob("large.megakernel/manifest.json"))


def test_a_hugging_face_folder_is_a_tokenizer(tmp_path: Path):
    tokenizer = train_bpe(documents(50, seed=3), 300)
    tokenizer.save(tmp_path / "tokenizer")
    texts = [[*ids, tokenizer.eod] for ids in tokenizer.encode_batch(documents(30, seed=4))]
    prefix = write(tmp_path / "web", texts)
    corpora = Corpora(data(prefix, tokenizer=str(tmp_path / "tokenizer")), validation=False)
    assert corpora.tokenizer.hash == tokenizer.hash == corpora.tokenizer_hash
    assert not corpora.is_text("train"), "the bytes of its text are not known"


def test_documents_that_do_not_end_with_the_end_of_document_token_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    prefix = write(tmp_path / "web", [list(b"one"), [*b"two", 256], list(b"three")])
    with caplog.at_level(logging.WARNING):
        Corpora(data(prefix), validation=False)
    assert f"2 of 3 documents of {prefix} do not end with" in caplog.text


def edit(prefix: Path, kind: str, change: Callable[[bytearray], bytearray]) -> Path:
    file = prefix.with_name(f"{prefix.name}.{kind}")
    file.write_bytes(change(bytearray(file.read_bytes())))
    return prefix


def with_version(index: bytearray) -> bytearray:
    index[9:17] = struct.pack("<Q", 2)
    return index


def with_type(index: bytearray) -> bytearray:
    index[17] = DType.code_from_dtype(np.float32)
    return index


def with_other_lengths(index: bytearray) -> bytearray:
    index[34:38] = struct.pack("<i", 7)
    return index


DAMAGE: dict[str, tuple[str, Callable[[bytearray], bytearray], str]] = {
    "multimodal": (
        "idx",
        lambda b: b + b"\0" * 90,
        "has a mode for each sequence (multimodal), which is not read",
    ),
    "version": ("idx", with_version, "is of version 2, and only version 1 is read"),
    "legacy": ("idx", lambda b: bytearray(b"TNTIDX\0\0") + b[8:], "legacy format (TNTIDX)"),
    "foreign": ("idx", lambda b: bytearray(b"x" * len(b)), "is no index of Megatron"),
    "empty": ("idx", lambda b: bytearray(), "is no index of Megatron"),
    "cut index": ("idx", lambda b: b[:-8], "but its header says"),
    "floats": ("idx", with_type, "holds float32 numbers, no token ids"),
    "cut tokens": ("bin", lambda b: b[:-2], "documents are not those of"),
    "other lengths": ("idx", with_other_lengths, "documents are not those of"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_files_of_another_format_are_refused_by_its_name(prefix: Path, name: str):
    kind, change, message = DAMAGE[name]
    error = error_of(edit(prefix, kind, change))
    assert error.startswith(f"data.train={prefix}")
    assert message in error


def test_a_missing_file_and_the_folder_instead_of_the_prefix_are_refused(prefix: Path):
    assert error_of(prefix.parent) == (
        f"data.train={prefix.parent} has no manifest.json, but token files of Megatron; give their prefix, {prefix}"
    )
    prefix.with_name(f"{prefix.name}.bin").unlink()
    assert ".bin does not exist; give the prefix of both files" in error_of(prefix)


def test_in_a_read_only_folder_the_manifest_is_elsewhere(
    prefix: Path, tmp_path: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "read_only"
    folder.mkdir()
    for kind in ("bin", "idx"):
        Path(f"{prefix}.{kind}").rename(folder / f"{prefix.name}.{kind}")
    prefix = folder / prefix.name
    folder.chmod(0o555)  # which root could write, but does not
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Corpora(data(prefix), validation=False)
    assert list((tmp_path / "cache/megakernel/corpora").glob("*/manifest.json"))
    config = configure(prefix, steps=2, data={"tokenizer": "byte"}, eval_samples=0)
    TrainingBatches(config, Corpora(config.data, validation=False), Share())
    assert list(config.data.index_cache.glob(f"{prefix.name}-*/manifest.json"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", staticmethod(lambda: (_ for _ in ()).throw(RuntimeError("no home"))))
    assert "set data.index_cache to a writable folder" in error_of(prefix)
    assert not prefix.with_name(f"{prefix.name}.megakernel").exists()


def test_copies_read_the_same_samples(prefix: Path, tmp_path: Path, configure: Configure):
    moved = tmp_path / "moved"
    moved.mkdir()
    for kind in ("bin", "idx"):
        shutil.copy2(f"{prefix}.{kind}", moved)
    rows = []
    for place in (prefix, moved / prefix.name):
        config = configure(place, data={"tokenizer": "byte"}, eval_samples=0)
        corpora = Corpora(config.data, validation=False)
        rows.append(
            torch.cat([b.tokens for b in next(TrainingBatches(config, corpora, Share()).from_step(3))])
        )
    assert torch.equal(*rows)

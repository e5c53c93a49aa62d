"""Overlapping windows predict each token once."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from data_pipeline.corpus import PreparedCorpus
from megakernel.evaluation.sliding import ScoredWindow, SlidingBatches, windows
from tests.chats import CHATML, conversation, save_tokenizer, write_chats
from tests.unit.data.conftest import documents, prepared, write_jsonl

SEQ_LEN, STRIDE, EOD = 32, 12, 256


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    """A corpus of documents of 10 to 200 bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    source = write_jsonl(folder / "source.jsonl", documents(60, seed=1))
    manifest = prepared(folder / "prepared", [str(source)])
    return PreparedCorpus(folder / "prepared", 1.0, manifest)


def test_the_last_window_ends_with_the_document():
    assert list(windows(70, 32, 12)) == [
        ScoredWindow(0, 0, 32),
        ScoredWindow(12, 32, 44),
        ScoredWindow(24, 44, 56),
        ScoredWindow(36, 56, 68),
        ScoredWindow(37, 68, 69),
    ]
    assert list(windows(33, 32, 12)) == [ScoredWindow(0, 0, 32)]
    assert list(windows(10, 32, 12)) == [ScoredWindow(0, 0, 9)]
    assert list(windows(1, 32, 12)) == []


def test_every_token_of_every_document_is_predicted_once(corpus: PreparedCorpus):
    batches = SlidingBatches([corpus], SEQ_LEN, STRIDE, 10**6, 3, EOD)
    read = list(batches)
    assert len(read) == len(batches)
    assert sum(len(batch.tokens) for batch in read) == batches.samples
    predicted: Counter[int] = Counter()
    for batch in read:
        predicted.update(batch.labels[batch.loss_mask].tolist())
        first_predicted = batch.loss_mask & (batch.loss_mask.cumsum(1) == 1)
        first = first_predicted.int().argmax(1)
        assert all(place == 0 or place >= SEQ_LEN - STRIDE for place in first.tolist())
        assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    expected: Counter[int] = Counter()
    for document in IndexedDataset(str(corpus.prefix("validation"))):
        expected.update(document[1:].tolist())
    assert predicted == expected


def test_the_number_of_windows_is_limited(corpus: PreparedCorpus):
    batches = SlidingBatches([corpus, corpus], SEQ_LEN, STRIDE, 7, 3, EOD)
    assert batches.samples == 7
    assert [len(batch.tokens) for batch in batches] == [3, 3, 1]


@pytest.mark.parametrize("seq_len", [16, 64])
def test_positions_restart_in_every_window(corpus: PreparedCorpus, seq_len: int):
    for batch in SlidingBatches([corpus], seq_len, seq_len // 2, 4, 4, EOD):
        assert torch.equal(batch.positions[0], torch.arange(seq_len))


@pytest.mark.second
def test_only_assistant_tokens_of_conversations_are_predicted_once(tmp_path: Path):
    chats = [
        conversation(f"What is {number}?", f"It is {number}." * 9, "And?", "No.") for number in range(30)
    ]
    source, tokenizer = (
        write_chats(tmp_path / "chats.jsonl", chats),
        save_tokenizer(CHATML, tmp_path / "tokenizer"),
    )
    manifest = prepared(
        tmp_path / "chats", [str(source)], tokenizer=str(tokenizer), chat=True, text_key="messages"
    )
    corpus = PreparedCorpus(tmp_path / "chats", 1.0, manifest)
    read = list(SlidingBatches([corpus], SEQ_LEN, STRIDE, 10**6, 3, EOD))
    record = manifest.splits["validation"].scored
    assert record is not None
    assert sum(int(batch.loss_mask.sum()) for batch in read) == record.tokens
    assistant_tokens = torch.cat([batch.labels[batch.loss_mask] for batch in read])
    assert not (assistant_tokens == ord("W")).any(), "only questions contain a W"

"""Windows that overlap predict each token once."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from data_pipeline.corpus import PreparedCorpus
from megakernel.evaluation.sliding import SlidingBatches, SlidingWindow, windows
from tests.chats import CHATML, said, saved, write_chats
from tests.unit.data.conftest import documents, prepared, write_jsonl

SEQ_LEN, STRIDE, EOD = 32, 12, 256


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    """Documents of 10 to 200 bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    source = write_jsonl(folder / "source.jsonl", documents(60, seed=1))
    manifest = prepared(folder / "prepared", [str(source)])
    return PreparedCorpus(folder / "prepared", 1.0, manifest)


def test_windows_end_where_the_document_does():
    assert list(windows(70, 32, 12)) == [
        SlidingWindow(0, 0, 32),
        SlidingWindow(12, 32, 44),
        SlidingWindow(24, 44, 56),
        SlidingWindow(36, 56, 68),
        SlidingWindow(37, 68, 69),
    ]
    assert list(windows(33, 32, 12)) == [SlidingWindow(0, 0, 32)]
    assert list(windows(10, 32, 12)) == [SlidingWindow(0, 0, 9)]
    assert list(windows(1, 32, 12)) == []


def test_every_token_of_every_document_is_predicted_once(part: PreparedCorpus):
    batches = SlidingBatches([part], SEQ_LEN, STRIDE, 10**6, 3, EOD)
    read = list(batches)
    assert len(read) == len(batches)
    assert sum(len(batch.tokens) for batch in read) == batches.samples
    predicted: Counter[int] = Counter()
    for batch in read:
        predicted.update(batch.labels[batch.loss_mask].tolist())
        behind_the_first = batch.loss_mask & (batch.loss_mask.cumsum(1) == 1)
        first = behind_the_first.int().argmax(1)
        assert all(place == 0 or place >= SEQ_LEN - STRIDE for place in first.tolist())
        assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    wanted: Counter[int] = Counter()
    for document in IndexedDataset(str(part.prefix("validation"))):
        wanted.update(document[1:].tolist())
    assert predicted == wanted


def test_no_more_windows_are_read_than_asked_for(part: PreparedCorpus):
    batches = SlidingBatches([part, part], SEQ_LEN, STRIDE, 7, 3, EOD)
    assert batches.samples == 7
    assert [len(batch.tokens) for batch in batches] == [3, 3, 1]


@pytest.mark.parametrize("seq_len", [16, 64])
def test_positions_count_from_the_start_of_a_window(part: PreparedCorpus, seq_len: int):
    for batch in SlidingBatches([part], seq_len, seq_len // 2, 4, 4, EOD):
        assert torch.equal(batch.positions[0], torch.arange(seq_len))


@pytest.mark.second
def test_of_conversations_what_the_assistant_wrote_is_predicted_once(tmp_path: Path):
    chats = [said(f"What is {at}?", f"It is {at}." * 9, "And?", "No.") for at in range(30)]
    source, given = write_chats(tmp_path / "chats.jsonl", chats), saved(CHATML, tmp_path / "tokenizer")
    manifest = prepared(
        tmp_path / "chats", [str(source)], tokenizer=str(given), chat=True, text_key="messages"
    )
    part = PreparedCorpus(tmp_path / "chats", 1.0, manifest)
    read = list(SlidingBatches([part], SEQ_LEN, STRIDE, 10**6, 3, EOD))
    record = manifest.splits["validation"].scored
    assert record is not None
    assert sum(int(batch.loss_mask.sum()) for batch in read) == record.tokens
    said_by_assistant = torch.cat([batch.labels[batch.loss_mask] for batch in read])
    assert not (said_by_assistant == ord("W")).any(), "questions alone have one"

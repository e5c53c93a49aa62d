import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_pipeline import packing as module
from data_pipeline.corpus import Corpora
from data_pipeline.loader import TrainingBatches
from data_pipeline.order import Share
from data_pipeline.packing import pack, packing_table
from megakernel.config.tree import Config


def test_whole_and_cut_documents_are_counted():
    # Documents in this order: 0-2 | 3-9 | 10-13 | 14 15, in sequences of 5: 0-4 | 5-9 | 10-14, with token 15 left over.
    found = pack("data/x", np.array([7, 3, 2, 4], np.int32), np.array([1, 0, 3, 2], np.int32), 5, sequences=3)
    assert (found.documents, found.tokens) == (4, 16)
    assert found.whole == 2, "the first and the third"
    assert found.parts == 2 + 1 + 2
    assert found.cut_tokens == 7 + 2, "the second, and the last, which extends past the sequences"
    assert found.lost == pytest.approx(1 / 16)


@pytest.mark.parametrize("chunk", [1, 3, 2**20])
@pytest.mark.parametrize("seq_len", [1, 7, 40, 300])
def test_counts_equal_a_token_by_token_count(seq_len: int, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    draw = random.Random(seq_len)
    lengths = [draw.randint(1, 60) for _ in range(30)]
    order = draw.sample(range(30), 30)
    owner = [document for document in order for _ in range(lengths[document])]
    count = (len(owner) - 1) // seq_len
    rows = [set(owner[row * seq_len : (row + 1) * seq_len]) for row in range(count)]
    leftover = set(owner[count * seq_len :])
    occurrences = {document: sum(document in row for row in [*rows, leftover]) for document in order}
    whole = {document for document in order if occurrences[document] == 1 and document not in leftover}
    found = pack("data/x", np.array(lengths, np.int32), np.array(order, np.int32), seq_len, count)
    assert found.whole == len(whole)
    assert found.parts == sum(map(len, rows))
    assert found.cut_tokens == sum(lengths[document] for document in order if document not in whole)
    assert found.lost == pytest.approx(len(owner[count * seq_len :]) / len(owner))


def test_packing_is_reported_once_per_length(corpus: Path, configure: Callable[..., Config]):
    config = configure(
        corpus,
        seq_len=256,
        seq_len_schedule=[
            {"until_step": 2, "seq_len": 64},
            {"until_step": 4, "seq_len": 64, "global_batch_size": 4},
        ],
    )
    batches = TrainingBatches(config, Corpora(config.data), Share())
    short, long = batches.packing()
    assert (short.seq_len, long.seq_len) == (64, 256)
    assert short.tokens == long.tokens == Corpora(config.data).train[0].record("train").tokens
    assert short.whole < long.whole
    assert short.cut_tokens > long.cut_tokens
    first, *lines = str(long).splitlines()
    assert first == f"{corpus} in sequences of 256 tokens:"
    assert lines[0].startswith(f"  {long.documents} documents, ")
    assert max(map(len, lines)) <= 80
    assert batches.packing(step=4) == [long]
    assert packing_table([short, long]).count("\n") == 3

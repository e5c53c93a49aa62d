"""What the far context is worth, to a model that counts letters."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from data_pipeline.corpus import PreparedCorpus
from data_pipeline.samples import BlendedSamples
from megakernel.evaluation.far_context import bucket_starts, measure_far
from tests.unit.data.conftest import prepared, write_jsonl
from tests.unit.evaluation.test_answers import subject

SEQ_LEN, NEAR, VOCABULARY = 128, 16, 257


class LetterShares:
    """A model that gives each token the share it has among those before, which is all it knows."""

    settings = SimpleNamespace(loss_chunk_size=1000)

    def hidden(self, tokens, positions):
        counts = F.one_hot(tokens, VOCABULARY).float().cumsum(1)
        # Where a document begins, what was counted before is forgotten.
        begun = torch.arange(tokens.shape[1]) - positions
        before = torch.cat([torch.zeros_like(counts[:, :1]), counts], 1)
        counts = counts - before.gather(1, begun[..., None].expand_as(counts))
        shares = counts / counts.sum(-1, keepdim=True)
        return shares.clamp(min=1e-6).log().transpose(0, 1)

    def logits(self, hidden):
        return hidden.transpose(0, 1)


def letters(folder: Path, names: str, **request) -> PreparedCorpus:
    """A document of one letter for each, in whole sequences."""
    source = write_jsonl(folder / "letters.jsonl", [name * (3 * SEQ_LEN - 1) for name in names])
    manifest = prepared(folder / "letters", [str(source)], validation_fraction=0.0, **request)
    return PreparedCorpus(folder / "letters", 1.0, manifest)


def far(corpus: PreparedCorpus, cache: Path, count: int):
    samples = BlendedSamples([corpus], "train", SEQ_LEN, 0, cache)
    samples.build(count)
    return measure_far(subject(LetterShares()), samples, count, 2, NEAR, lambda *_: None)


def test_other_documents_stand_before_the_nearest_tokens_and_nowhere_else(tmp_path):
    buckets = far(letters(tmp_path, "abcdefgh"), tmp_path, 9)
    assert [bucket.first for bucket in buckets] == [32, 64]
    for bucket in buckets:
        assert bucket.last == bucket.first + NEAR - 1
        assert bucket.tokens == 9 * NEAR
        assert bucket.loss == pytest.approx(0, abs=1e-3)
        # Of p + 1 tokens up to position p, first - NEAR are other letters.
        places = range(bucket.first, bucket.first + NEAR)
        shares = [(p + 1 - (bucket.first - NEAR)) / (p + 1) for p in places]
        assert bucket.gain == pytest.approx(-sum(map(math.log, shares)) / NEAR, rel=2e-3)  # the clamp


def test_buckets_have_something_that_is_far():
    assert bucket_starts(NEAR, SEQ_LEN) == [32, 64]
    assert bucket_starts(31, 33) == [32]
    assert bucket_starts(40, 64) == []


def test_a_corpus_of_one_document_has_no_other(tmp_path):
    with pytest.raises(ValueError, match="has no document in its train split beside those of a sequence"):
        far(letters(tmp_path, "a"), tmp_path, 1)

"""The measured gain from far context, for a model that counts letters."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from data_pipeline.corpus import Corpora, PreparedCorpus
from data_pipeline.samples import BlendedSamples
from megakernel.evaluation.far_context import bucket_starts, measure_far
from megakernel.evaluation.run import parse
from tests.unit.config import trees
from tests.unit.data.conftest import prepared, write_jsonl
from tests.unit.evaluation.test_answers import subject

SEQ_LEN, NEAR, VOCABULARY = 128, 16, 257


class LetterFrequencies:
    """A model that predicts each token by its frequency among the previous ones."""

    settings = SimpleNamespace(loss_chunk_size=1000)

    def hidden(self, tokens, positions):
        counts = F.one_hot(tokens, VOCABULARY).float().cumsum(1)
        # Counts restart at the beginning of a document.
        starts = torch.arange(tokens.shape[1]) - positions
        before = torch.cat([torch.zeros_like(counts[:, :1]), counts], 1)
        counts = counts - before.gather(1, starts[..., None].expand_as(counts))
        frequencies = counts / counts.sum(-1, keepdim=True)
        return frequencies.clamp(min=1e-6).log().transpose(0, 1)

    def logits(self, hidden):
        return hidden.transpose(0, 1)


def letters(folder: Path, names: str, **request) -> PreparedCorpus:
    """A corpus with one document per letter, each several sequences long."""
    source = write_jsonl(folder / "letters.jsonl", [name * (3 * SEQ_LEN - 1) for name in names])
    manifest = prepared(folder / "letters", [str(source)], validation_fraction=0.0, **request)
    return PreparedCorpus(folder / "letters", 1.0, manifest)


def measure(corpus: PreparedCorpus, cache: Path, count: int):
    samples = BlendedSamples([corpus], "train", SEQ_LEN, 0, cache)
    samples.build(count)
    return measure_far(subject(LetterFrequencies()), samples, count, 2, NEAR, lambda *_: None)


def test_only_tokens_before_the_nearest_ones_are_replaced_by_other_documents(tmp_path):
    buckets = measure(letters(tmp_path, "abcdefgh"), tmp_path, 9)
    assert [bucket.first for bucket in buckets] == [32, 64]
    for bucket in buckets:
        assert bucket.last == bucket.first + NEAR - 1
        assert bucket.tokens == 9 * NEAR
        assert bucket.loss == pytest.approx(0, abs=1e-3)
        # Of the p + 1 tokens up to position p, first - NEAR are other letters.
        positions = range(bucket.first, bucket.first + NEAR)
        frequencies = [(p + 1 - (bucket.first - NEAR)) / (p + 1) for p in positions]
        assert bucket.gain == pytest.approx(
            -sum(map(math.log, frequencies)) / NEAR, rel=2e-3
        )  # tolerance for the clamp


@pytest.mark.parametrize("scored", ["all", "answers"])
def test_only_tokens_that_count_in_training_are_measured(tmp_path, scored: str):
    prepared(tmp_path / "recall", ["task:mqar:length=64"], max_documents=40)
    config = trees.config(
        model={"attention": "softmax"},
        data={"train": tmp_path / "recall", "scored": scored},
        training={"seq_len": 64, "micro_batch_size": 1, "eval_samples": 4},
    )
    corpora = Corpora(config.data)
    source = replace(subject(LetterFrequencies()), config=config, corpora=corpora)
    (task,) = parse([f"lm:far=shuffled,near={NEAR}"])
    task.check(source)
    # One bucket of 16 positions per sample; an example has eight answers of one token each.
    tokens = sum(bucket.tokens for bucket in task.measure(source, lambda done, total: None).buckets)
    assert tokens == 4 * 16 if scored == "all" else 0 < tokens < 4 * 8


def test_buckets_start_beyond_the_near_tokens():
    assert bucket_starts(NEAR, SEQ_LEN) == [32, 64]
    assert bucket_starts(31, 33) == [32]
    assert bucket_starts(40, 64) == []


def test_a_corpus_of_one_document_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no document in its train split other than those of a sequence"):
        measure(letters(tmp_path, "a"), tmp_path, 1)

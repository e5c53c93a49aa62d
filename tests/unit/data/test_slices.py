"""Reading a context-parallel shard of a sequence without the rest of it."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data_pipeline.batch import Batch
from data_pipeline.corpus import Corpora
from data_pipeline.loader import TrainingBatches, ValidationBatches
from data_pipeline.order import Share
from data_pipeline.samples import CorpusSamples
from data_pipeline.token_files import TokenFile
from megakernel.config.tree import Config

Configure = Callable[..., Config]
SEQ_LEN = 512
"""Long enough for several documents of the corpus, which have 10 to 200 bytes."""

FIELDS = ("tokens", "labels", "loss_mask", "positions")


@pytest.fixture
def samples(corpus: Path, configure: Configure, tmp_path: Path) -> CorpusSamples:
    """The corpus in sequences of SEQ_LEN tokens."""
    samples = CorpusSamples(Corpora(configure(corpus).data).train[0], "train", SEQ_LEN, 7, tmp_path)
    samples.build(1)
    assert samples.per_epoch > 5
    return samples


@pytest.fixture
def tokens_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens that each call read from a token file, since the last `clear`."""
    counts: list[int] = []
    get = TokenFile.get

    def counted(self, *arguments, **keywords):
        tokens = get(self, *arguments, **keywords)
        counts.append(len(tokens))
        return tokens

    monkeypatch.setattr(TokenFile, "get", counted)
    return counts


def config_of_kind(configure: Configure, corpus: Path, kind: str, **data: object) -> Config:
    config = configure(corpus, seq_len=SEQ_LEN, data=data)
    return config.model_copy(update={"model": config.model.model_copy(update={"kind": kind})})


def test_a_sample_is_that_of_megatron(samples: CorpusSamples):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    plan = samples._dataset(0, samples._index_folder(0))
    plan.dataset = IndexedDataset(str(samples._corpus.prefix("train")))  # it plans from the lengths alone
    for row in range(samples.per_epoch):
        sample = plan[row]
        assert torch.equal(samples[row], torch.cat([sample["tokens"], sample["labels"][-1:]]))


def test_any_slice_of_a_sample_equals_that_slice_of_the_whole(samples: CorpusSamples):
    for row in range(samples.per_epoch):
        whole = samples[row]
        ends = (whole == 256).nonzero().flatten().tolist()
        # At, before and after ends of documents, and the label after the sequence.
        edges = sorted(
            {0, 1, SEQ_LEN, SEQ_LEN + 1, *(end + d for end in ends for d in (0, 1, 2) if end + d <= SEQ_LEN)}
        )
        for start, end in itertools.pairwise(edges):
            cp_shard = samples.read(row, start, end)
            assert torch.equal(cp_shard.tokens, whole[start:end])
            starts = [max((eod + 1 for eod in ends if eod < index), default=0) for index in range(start, end)]
            expected = [index - first for index, first in zip(range(start, end), starts)]
            assert cp_shard.doc_positions.tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("kind", ["causal_lm", "masked_lm"])
def test_context_parallel_shards_concatenate_to_the_packed_sequences(
    kind: str, isolate: bool, size: int, corpus: Path, configure: Configure
):
    config = config_of_kind(configure, corpus, kind, isolate_documents=isolate)
    corpora = Corpora(config.data)

    def read(share: Share) -> list[Batch]:
        training = next(TrainingBatches(config, corpora, share).from_step(4))
        return [*training, *ValidationBatches(config, corpora, share)]

    shards = [read(Share(cp_rank=rank, cp_size=size)) for rank in range(size)]
    continued = 0
    for number, whole in enumerate(read(Share())):
        for name in FIELDS:
            parts = [getattr(cp_shard[number], name) for cp_shard in shards]
            assert torch.equal(torch.cat(parts, 1), getattr(whole, name)), name
        continued += sum(int((cp_shard[number].positions[:, 0] > 0).sum()) for cp_shard in shards)
    assert continued or size == 1, "the test needs documents that cross shard boundaries"


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_shard_reads_only_its_tokens_and_one_more_label(
    size: int, corpus: Path, configure: Configure, tokens_read: list[int]
):
    config = config_of_kind(configure, corpus, "causal_lm")
    corpora = Corpora(config.data)
    for rank in range(size):
        batches = TrainingBatches(config, corpora, Share(cp_rank=rank, cp_size=size))
        tokens_read.clear()
        rows = sum(len(batch.tokens) for batch in next(batches.from_step(2)))
        assert sum(tokens_read) == rows * (SEQ_LEN // size + 1)

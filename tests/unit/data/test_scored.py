"""Corpora that mark the answer tokens, and training whose loss counts only those."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch

from data_pipeline.corpus import Corpora
from data_pipeline.loader import TrainingBatches, ValidationBatches
from data_pipeline.order import Share
from data_pipeline.synthetic.source import TaskSource
from data_pipeline.tokenizers import ByteTokenizer
from megakernel.config.tree import Config
from tests.unit.data.conftest import prepared

Configure = Callable[..., Config]
LENGTH = 48
SPEC = f"mqar:pairs=5,length={LENGTH}"
ANSWERS = {"data": {"scored": "answers"}}


@pytest.fixture(scope="module")
def recall(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 examples of associative recall as bytes."""
    folder = tmp_path_factory.mktemp("recall") / "prepared"
    prepared(folder, [f"task:{SPEC}"], max_documents=90)
    return folder


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[tuple[int, int], ...]]:
    """Text of an example -> spans of its answers."""
    source = TaskSource.from_spec(SPEC)
    source.set_tokenizer(ByteTokenizer())
    documents = islice(source, 90)
    return {document.texts[0]: document.answers or () for document in documents}


def counted_tokens(batch) -> torch.Tensor:
    """loss_mask shifted by one: which tokens are labels that count (B, N + 1)."""
    return torch.nn.functional.pad(batch.loss_mask, (1, 0))


def test_only_answers_count_as_labels(recall: Path, configure: Configure, answers):
    config = configure(recall, seq_len=LENGTH, **ANSWERS)
    batches = TrainingBatches(config, Corpora(config.data), Share())
    rows = 0
    for batch in [*next(batches.from_step(0)), *next(batches.from_step(3))]:
        for tokens, counts in zip(batch.tokens, counted_tokens(batch)[:, :-1]):
            assert tokens[-1] == 256, "each sequence is one document"
            wanted = torch.zeros(LENGTH, dtype=torch.bool)
            for start, end in answers[bytes(tokens[:-1].tolist()).decode()]:
                wanted[start:end] = True
            assert torch.equal(counts, wanted)
            assert wanted.sum() == 5
            rows += 1
    assert rows == 16


@pytest.mark.parametrize("size", [1, 2, 4])
def test_context_parallel_shards_count_the_same_labels(recall: Path, configure: Configure, size: int):
    # Sequences and shards that are not as long as the documents, so that both cut them.
    config = configure(recall, seq_len=64, **ANSWERS)
    corpora = Corpora(config.data)

    def masks(share: Share) -> list[torch.Tensor]:
        batches = [*next(TrainingBatches(config, corpora, share).from_step(2))]
        batches += ValidationBatches(config, corpora, share)
        return [batch.loss_mask for batch in batches]

    whole = masks(Share())
    shards = [masks(Share(cp_rank=rank, cp_size=size)) for rank in range(size)]
    for index, mask in enumerate(whole):
        assert torch.equal(torch.cat([cp_shard[index] for cp_shard in shards], 1), mask)
    fraction = torch.cat([mask.flatten() for mask in whole]).float().mean()
    assert fraction == pytest.approx(5 / LENGTH, rel=0.2)


def test_without_scored_answers_all_labels_of_a_task_corpus_count(recall: Path, configure: Configure):
    config = configure(recall, seq_len=LENGTH)
    (batch, *_) = next(TrainingBatches(config, Corpora(config.data), Share()).from_step(0))
    assert torch.equal(batch.loss_mask, batch.tokens != 256)


def test_all_labels_of_plain_text_count_in_a_mixture_with_tasks(
    recall: Path, corpus: Path, configure: Configure
):
    config = configure([recall, corpus], seq_len=LENGTH, **ANSWERS)
    batches = next(TrainingBatches(config, Corpora(config.data), Share()).from_step(0))
    fractions = {round(float(mask.float().mean()), 1) for batch in batches for mask in batch.loss_mask}
    assert min(fractions) == 0.1
    assert max(fractions) > 0.9


def test_scored_answers_need_a_corpus_that_records_answers(corpus: Path, configure: Configure):
    config = configure(corpus, **ANSWERS)
    with pytest.raises(
        ValueError, match=r"data\.scored=answers: data\.train=.* records no answers; prepare it"
    ):
        TrainingBatches(config, Corpora(config.data), Share())


def test_scored_answers_are_refused_for_an_encoder(corpus: Path, configure: Configure):
    config = configure(corpus, **ANSWERS)
    tree = config.model_dump()
    tree["model"]["kind"] = "masked_lm"
    with pytest.raises(ValueError, match=r"data\.scored=answers has no effect on model\.kind: masked_lm"):
        Config(**tree)


def test_a_missing_answer_file_is_named(recall: Path, configure: Configure, tmp_path: Path):
    for file in recall.iterdir():
        if file.is_file() and not file.name.startswith("train.scored"):
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer").symlink_to(recall / "tokenizer")
    with pytest.raises(ValueError, match=r"lacks train\.scored\.bin"):
        Corpora(configure(tmp_path).data)


@pytest.mark.parametrize(
    ("request_", "explanation"),
    [
        ({"source": [f"task:{SPEC}"]}, "has no end; say how many with --max-documents N"),
        ({"source": ["task:recal"], "max_documents": 2}, "--source task: recal is not a task; choose "),
        (
            {"source": ["task:passkey:filler=validation"], "max_documents": 2},
            "give filler=sentences or a text",
        ),
        ({"source": [f"task:{SPEC}"], "labels": "x", "max_documents": 2}, "--labels x is a column of tables"),
    ],
)
def test_invalid_task_requests_are_refused(request_, explanation: str, tmp_path: Path):
    with pytest.raises(ValueError, match=explanation):
        prepared(tmp_path / "out", **request_)
    assert not (tmp_path / "out").exists()

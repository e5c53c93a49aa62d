import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_pipeline.batch import Batch
from data_pipeline.corpus import Corpora
from megakernel.evaluation import Evaluation, PositionBucket
from megakernel.evaluation.perplexity import loss_by_position
from megakernel.evaluation.run import parse
from megakernel.evaluation.subject import LoadedRun
from tests.unit.config import trees
from tests.unit.data.conftest import documents, prepared, write_jsonl


class LossIsPosition:
    """A model whose loss at a position is the position."""

    def losses(self, tokens, positions, labels, num_targets):
        return positions.float()


def batch(positions, counted=None):
    positions = torch.as_tensor(positions)
    counted = torch.ones_like(positions, dtype=torch.bool) if counted is None else torch.as_tensor(counted)
    return Batch(tokens=positions, labels=positions, loss_mask=counted, positions=positions)


def measure(*batches):
    return loss_by_position(LossIsPosition(), batches, torch.device("cpu"), lambda done, total: None)


def test_bucket_sizes_double_and_the_last_ends_with_the_samples():
    buckets = measure(batch([list(range(100))]))
    assert [(bucket.first, bucket.last) for bucket in buckets] == [(0, 15), (16, 31), (32, 63), (64, 99)]
    assert [bucket.tokens for bucket in buckets] == [16, 16, 32, 36]
    assert [bucket.loss for bucket in buckets] == [7.5, 23.5, 47.5, 81.5]
    assert buckets[0].perplexity == math.exp(7.5)


def test_buckets_sum_over_batches_and_documents():
    packed = [*range(20), *range(12)]
    buckets = measure(batch([packed, packed]), batch([packed]))
    assert [bucket.tokens for bucket in buckets] == [3 * 28, 3 * 4]


def test_labels_that_do_not_count_are_not_measured():
    counted = [[position not in (3, 20) for position in range(24)]]
    buckets = measure(batch([list(range(24))], counted))
    assert [bucket.tokens for bucket in buckets] == [15, 7]
    assert buckets[0].loss == pytest.approx((sum(range(16)) - 3) / 15)


def test_a_bucket_without_predictions_is_omitted():
    buckets = measure(batch([[0, 1, 40]]))
    assert [(bucket.first, bucket.last) for bucket in buckets] == [(0, 15), (32, 40)]


@pytest.mark.parametrize("loss", [2500.0, math.inf])
def test_a_loss_above_the_largest_float_has_infinite_perplexity(loss: float):
    result = Evaluation("runs/x", 1, 1, 32, 32, loss, None, None, [PositionBucket(0, 31, 32, loss)])
    assert result.scalars()["perplexity"] == result.as_dict()["by_position"][0]["perplexity"] == math.inf
    assert result.table().total[-1] == "inf"
    # The mean squared error of a regression is not a cross entropy, and is often as large.
    scored = replace(result, by_position=[], scores={"pearson": 0.5})
    assert scored.table().total == ("all", "32", f"{loss:.4f}")


def test_the_perplexity_of_a_loss_that_is_not_a_number_is_none():
    result = Evaluation("runs/x", 1, 1, 32, 32, math.nan, None, None, [PositionBucket(0, 31, 32, math.nan)])
    assert math.isnan(result.perplexity)
    assert math.isnan(result.by_position[0].perplexity)


def evaluate(folder: Path, model: dict[str, Any], **data: Any) -> Evaluation:
    """The result of `--task lm` on 3 samples of `folder`/corpus."""
    config = trees.config(
        model={"attention": "softmax", **model},
        data={"train": folder / "corpus", **data},
        training={"seq_len": 32, "micro_batch_size": 1, "eval_samples": 3},
    )
    corpora = Corpora(config.data)
    run = SimpleNamespace(config=config, checkpoint=SimpleNamespace(step=5))
    device = torch.device("cpu")
    subject = LoadedRun(folder, run, config, corpora.tokenizer, corpora, LossIsPosition(), device)
    (task,) = parse(["lm"])
    task.check(subject)
    return task.measure(subject, lambda done, total: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a corpus."""
    folder = tmp_path_factory.mktemp("prepared")
    source = write_jsonl(folder / "rows.jsonl", documents(30, seed=1))
    prepared(folder / "corpus", [str(source)])
    return folder


def test_the_index_of_a_read_only_corpus_is_in_the_users_cache(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Permissions do not hold root back.
    monkeypatch.setattr("os.access", lambda path, mode: folder not in (path, *Path(path).parents))
    before = sorted((folder / "corpus").iterdir())
    assert evaluate(folder, {}).samples == 3
    assert sorted((folder / "corpus").iterdir()) == before
    assert list((tmp_path / "megakernel" / "indices").iterdir())


def test_a_user_without_a_home_reads_the_index_of_a_read_only_corpus(folder, monkeypatch):
    assert evaluate(folder, {}).samples == 3

    def fail(cls):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", classmethod(fail))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert evaluate(folder, {}).samples == 3


def test_samples_without_a_token_that_counts_are_refused(folder):
    with pytest.raises(
        ValueError, match=r"--task lm: no token of the 3 samples counts in the loss; give more"
    ):
        evaluate(folder, {"kind": "masked_lm"}, masking={"rate": 1e-9})


def test_progress_ends_with_all_passes_done():
    steps = []
    loss_by_position(
        LossIsPosition(), [batch([[0]])] * 3, torch.device("cpu"), lambda *step: steps.append(step)
    )
    assert steps == [(1, 3), (2, 3), (3, 3)]

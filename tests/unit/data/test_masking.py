from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data_pipeline.batch import Batch
from data_pipeline.corpus import Corpora
from data_pipeline.loader import TrainingBatches, ValidationBatches
from data_pipeline.masking import Vocabulary, hide
from data_pipeline.order import Share
from megakernel.config import Config, Masking

VOCABULARY = Vocabulary(size=257, eod=256)
ROW = torch.arange(100_000) % 257


def shares(masking: Masking) -> tuple[float, float, float, float]:
    """What share is predicted, and of that: masked, swapped, kept."""
    tokens, hidden = hide(ROW, masking, VOCABULARY, (1, 2))
    masked, kept = tokens[hidden] == VOCABULARY.mask, tokens[hidden] == ROW[hidden]
    assert torch.equal(tokens[~hidden], ROW[~hidden])
    each = [part.float().mean().item() for part in (masked, ~masked & ~kept, kept)]
    return hidden.float().mean().item(), *each


def test_by_default_it_is_berts_recipe():
    # 100,000 draws: three standard deviations are 0.003 of all tokens and 0.01 of those hidden. A random token is
    # the right one once in 257.
    hidden, masked, swapped, kept = shares(Masking())
    assert hidden == pytest.approx(0.15 * 256 / 257, abs=0.003)
    assert (masked, swapped, kept) == pytest.approx((0.8, 0.1, 0.1), abs=0.01)


def test_the_recipe_is_configurable():
    hidden, masked, _, kept = shares(Masking(rate=1.0, mask_share=0.0, random_share=1.0))
    assert hidden == pytest.approx(256 / 257, abs=1e-3)
    assert (masked, kept) == (0.0, pytest.approx(1 / 257, abs=0.002))


def test_what_is_hidden_depends_on_the_seed_alone():
    assert all(
        map(torch.equal, hide(ROW, Masking(), VOCABULARY, (1, 2)), hide(ROW, Masking(), VOCABULARY, (1, 2)))
    )
    assert not torch.equal(
        hide(ROW, Masking(), VOCABULARY, (1, 2))[1], hide(ROW, Masking(), VOCABULARY, (1, 3))[1]
    )


def test_ends_of_documents_are_never_hidden():
    tokens, hidden = hide(ROW, Masking(rate=1.0), VOCABULARY, (0,))
    assert torch.equal(hidden, ROW.ne(VOCABULARY.eod))
    assert (tokens[~hidden] == VOCABULARY.eod).all()


@pytest.fixture
def configured(corpus: Path, configure: Callable[..., Config]) -> Config:
    config = configure(corpus, steps=60)
    model = config.model.model_copy(update={"kind": "masked_lm"})
    return config.model_copy(update={"model": model})


def step(config: Config, at: int, **share: int) -> list[Batch]:
    return next(TrainingBatches(config, Corpora(config.data), Share(**share)).from_step(at))


def whole(batches: list[Batch], name: str) -> torch.Tensor:
    return torch.cat([getattr(batch, name) for batch in batches])


@pytest.mark.parametrize("name", ["tokens", "labels", "loss_mask", "positions"])
def test_every_layout_hides_the_same_tokens(configured: Config, name: str):
    expected = whole(step(configured, 3), name)
    replicas = [step(configured, 3, data_rank=rank, data_size=2) for rank in range(2)]
    assert torch.equal(whole([batch for passes in zip(*replicas) for batch in passes], name), expected)
    shards = [whole(step(configured, 3, cp_rank=rank, cp_size=2), name) for rank in range(2)]
    assert torch.equal(torch.cat(shards, 1), expected)


def test_labels_are_the_tokens_themselves_and_documents_stay_what_they_are(configured: Config):
    causal = configured.model_copy(
        update={"model": configured.model.model_copy(update={"kind": "causal_lm"})}
    )
    hidden, plain = step(configured, 0), step(causal, 0)
    assert torch.equal(whole(hidden, "labels"), whole(plain, "tokens"))
    assert torch.equal(whole(hidden, "positions"), whole(plain, "positions"))
    changed = whole(hidden, "tokens") != whole(plain, "tokens")
    assert changed.any()
    assert not (changed & ~whole(hidden, "loss_mask")).any()


def test_a_text_that_comes_again_has_other_tokens_hidden(configured: Config):
    seen: dict[tuple[int, ...], set[tuple[bool, ...]]] = {}
    for at in range(60):
        for batch in step(configured, at):
            for labels, mask in zip(batch.labels.tolist(), batch.loss_mask.tolist()):
                seen.setdefault(tuple(labels), set()).add(tuple(mask))
    again = [masks for masks in seen.values() if len(masks) > 1]
    assert again, "some sample must have come twice"


def test_validation_hides_the_same_at_every_evaluation(configured: Config):
    batches = ValidationBatches(configured, Corpora(configured.data), Share())
    for first, second in zip(batches, batches):
        assert torch.equal(first.tokens, second.tokens)

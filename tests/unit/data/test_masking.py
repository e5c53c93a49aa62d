from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data_pipeline.batch import Batch
from data_pipeline.corpus import Corpora
from data_pipeline.loader import ValidationBatches
from data_pipeline.masking import Vocabulary, hide
from data_pipeline.order import Share
from megakernel.config import Config, Masking
from tests.unit.data.conftest import step_batches

VOCABULARY = Vocabulary(size=257, eod=256)
ROW = torch.arange(100_000) % 257


def fractions(masking: Masking) -> tuple[float, float, float, float]:
    """Fraction of predicted tokens, and of these the fractions masked, swapped and kept."""
    tokens, hidden = hide(ROW, masking, VOCABULARY, (1, 2))
    masked, kept = tokens[hidden] == VOCABULARY.mask, tokens[hidden] == ROW[hidden]
    assert torch.equal(tokens[~hidden], ROW[~hidden])
    each = [part.float().mean().item() for part in (masked, ~masked & ~kept, kept)]
    return hidden.float().mean().item(), *each


def test_the_default_is_the_recipe_of_bert():
    # 100,000 draws: three standard deviations are 0.003 of all tokens and 0.01 of the hidden ones. A random token is
    # the original one once in 257.
    hidden, masked, swapped, kept = fractions(Masking())
    assert hidden == pytest.approx(0.15 * 256 / 257, abs=0.003)
    assert (masked, swapped, kept) == pytest.approx((0.8, 0.1, 0.1), abs=0.01)


def test_the_recipe_is_configurable():
    hidden, masked, _, kept = fractions(Masking(rate=1.0, mask_share=0.0, random_share=1.0))
    assert hidden == pytest.approx(256 / 257, abs=1e-3)
    assert (masked, kept) == (0.0, pytest.approx(1 / 257, abs=0.002))


def test_hidden_tokens_depend_only_on_the_seed():
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
def masked_config(corpus: Path, configure: Callable[..., Config]) -> Config:
    config = configure(corpus, steps=60)
    model = config.model.model_copy(update={"kind": "masked_lm"})
    return config.model_copy(update={"model": model})


def concatenated(batches: list[Batch], name: str) -> torch.Tensor:
    return torch.cat([getattr(batch, name) for batch in batches])


@pytest.mark.parametrize("name", ["tokens", "labels", "loss_mask", "positions"])
def test_every_layout_hides_the_same_tokens(masked_config: Config, name: str):
    expected = concatenated(step_batches(masked_config, 3), name)
    replicas = [step_batches(masked_config, 3, data_rank=rank, data_size=2) for rank in range(2)]
    assert torch.equal(concatenated([batch for passes in zip(*replicas) for batch in passes], name), expected)
    shards = [
        concatenated(step_batches(masked_config, 3, cp_rank=rank, cp_size=2), name) for rank in range(2)
    ]
    assert torch.equal(torch.cat(shards, 1), expected)


def test_labels_are_the_original_tokens_and_positions_do_not_change(masked_config: Config):
    causal = masked_config.model_copy(
        update={"model": masked_config.model.model_copy(update={"kind": "causal_lm"})}
    )
    hidden, plain = step_batches(masked_config, 0), step_batches(causal, 0)
    assert torch.equal(concatenated(hidden, "labels"), concatenated(plain, "tokens"))
    assert torch.equal(concatenated(hidden, "positions"), concatenated(plain, "positions"))
    changed = concatenated(hidden, "tokens") != concatenated(plain, "tokens")
    assert changed.any()
    assert not (changed & ~concatenated(hidden, "loss_mask")).any()


def test_a_repeated_sequence_has_other_tokens_hidden(masked_config: Config):
    seen: dict[tuple[int, ...], set[tuple[bool, ...]]] = {}
    for number in range(60):
        for batch in step_batches(masked_config, number):
            for labels, mask in zip(batch.labels.tolist(), batch.loss_mask.tolist()):
                seen.setdefault(tuple(labels), set()).add(tuple(mask))
    repeated = [masks for masks in seen.values() if len(masks) > 1]
    assert repeated, "the test needs a sample that is read twice"


def test_validation_hides_the_same_tokens_at_every_evaluation(masked_config: Config):
    batches = ValidationBatches(masked_config, Corpora(masked_config.data), Share())
    for first, second in zip(batches, batches):
        assert torch.equal(first.tokens, second.tokens)

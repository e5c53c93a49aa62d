"""Batches in which no token counts have no loss, and say so."""

from pathlib import Path

import pytest

from tests.chats import CHATML, conversation, save_tokenizer, write_chats
from tests.unit.data.conftest import prepared

from .processes import run_ranks
from .training_run import layout, metrics, pretrain_and_return_output, scalars, train, write_config

pytestmark = pytest.mark.second

BRIEF = ("logging.tensorboard=false", "training.global_batch_size=2", "training.micro_batch_size=1")


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """Long questions, each with a short answer."""
    folder = tmp_path_factory.mktemp("chats")
    talks = [conversation(f"{number} " + "why? " * 120, "Yes.") for number in range(60)]
    source = write_chats(folder / "chats.jsonl", talks)
    tokenizer = save_tokenizer(CHATML, folder / "tokenizer")
    prepared(folder / "prepared", [str(source)], tokenizer=str(tokenizer), chat=True, text_key="messages")
    return folder / "prepared"


@pytest.mark.parametrize("ranks", ["one process", "dp2", "pp2"])
def test_a_batch_without_a_counted_token_has_no_loss_and_is_reported_once(ranks, chats, tmp_path):
    world_size, *overrides = layout(ranks)
    config = write_config(tmp_path, chats)
    options = (*overrides, *BRIEF, "training.steps=12", "training.eval_samples=1")
    out, *others = run_ranks(pretrain_and_return_output, world_size, config, options)
    lines = metrics(tmp_path / "run")
    steps = [line for line in lines if "train/lr" in line]
    without = [line for line in steps if "train/loss" not in line]
    assert len(steps) == 12
    assert 0 < len(without) < 12
    assert all(loss > 1 for loss in scalars(lines, "train/loss")), "no loss of 0 among them"
    assert steps[-1]["train/steps_without_loss"] == len(without)
    assert not any(others)
    assert out.count("no token counts, and they have no loss") == 1
    first = steps.index(without[0]) + 1
    assert f"warning: in 1 of {first} batches so far ({1 / first:.0%})" in out
    assert "no loss" in out
    assert "loss 0.0000" not in out
    assert not scalars(lines, "train/bits_per_byte")


def test_an_evaluation_without_a_counted_token_has_no_value(chats, tmp_path):
    # No question of 600 tokens has an answer in its first 64, and the first sample of this set is such a part.
    config = write_config(tmp_path, chats)
    sizes = ("training.seq_len=64", "training.eval_samples=1", "training.steps=1")
    (out,) = run_ranks(pretrain_and_return_output, 1, config, (*BRIEF, *sizes))
    assert not scalars(metrics(tmp_path / "run"), "eval/loss")
    assert "no token of the 1 validation samples counts, so there is no loss" in out


def test_a_masked_model_without_masked_tokens_has_no_loss(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    masked = ("model.kind=masked_lm", "model.attention_pattern=[softmax]", "model.position=sinusoidal")
    lines = train(config, 1, *BRIEF, *masked, "data.masking={rate: 1e-9}", "training.steps=2")
    assert len([line for line in lines if "train/lr" in line]) == 2
    assert not scalars(lines, "train/loss")
    assert not scalars(lines, "eval/loss")

"""The configurations and the page of the recall benchmark."""

from dataclasses import replace

import pytest

from benchmarks.recall import MECHANISMS, RecallResult, Setup, page

SETUP = Setup("mqar:pairs=8", "byte", 16, 4, ["training.steps=3"])


@pytest.mark.parametrize("preset", MECHANISMS)
def test_every_mechanism_can_be_trained_on_answers(preset):
    config = SETUP.config(f"model.attention={SETUP.attention(preset)}")
    assert config.data.scored == "answers"
    assert config.model.is_causal
    assert config.training.seq_len // (config.model.attention.block_size or 1) in (128, 8)


def test_the_page_names_the_training_and_lists_the_best_first():
    results = [
        RecallResult("linear", {0: 3.3, 3: 3.0}, 0.1, 3.0, {256: 0.0}),
        RecallResult("softmax", {0: 3.3, 3: 0.1}, 1.0, 0.1, {256: 0.5}),
    ]
    text = page(SETUP, results, "python -m benchmarks.recall --pairs 8")
    assert "`mqar:pairs=8,length=128`" in text
    assert "3 steps of 32 sequences of 128 tokens" in text
    assert "| answers right | at 256 tokens |" in text
    assert text.index("| `softmax` | 3.300 | 0.100 | 0.100 | **100.0%** | 50.0% |") < text.index(
        "| `linear` |"
    )


def test_sequences_hold_several_examples_of_a_given_length():
    setup = Setup("passkey:digits=2,length=64", "bpe:1024", 8, 4, ["training.steps=3"])
    assert setup.task == "passkey:digits=2,length=64"
    assert setup.task_at(1024) == "passkey:digits=2,length=1024"
    assert SETUP.task_at(1024) == "mqar:pairs=8,length=1024"
    assert 2 * 3 * 32 < setup.num_examples < 3 * 3 * 32 + 100


def test_the_common_start_of_up_trainings_reads_its_own_examples():
    with_start = replace(SETUP, start="softmax+convolution", start_steps=7)
    assert with_start.num_examples == replace(SETUP, overrides=["training.steps=60"]).num_examples
    assert with_start.name != SETUP.name
    config = with_start.config(*with_start.overrides_of("flurka+convolution"))
    assert config.model.attention.short_convolution == 4
    results = [
        RecallResult("softmax+convolution", {}, 1.0, 0.1),
        RecallResult("flurka", {}, 0.9, 0.1, {}, 0.25),
    ]
    text = page(with_start, results, "python -m benchmarks.recall")
    assert "`softmax+convolution` has 7 steps from random weights" in text
    assert "| `flurka` | 0.100 | 25.0% → **90.0%** |" in text

"""The models, costs and rows of the decoding benchmark."""

import pytest

from benchmarks import decoding
from benchmarks.decoding import (
    BASELINE,
    OURS,
    Costs,
    DecodingCase,
    ModelSizes,
    baseline_session,
    llama,
    measure,
    our_model,
    our_session,
)

TINY = ModelSizes(layers=1, width=32, heads=2)


@pytest.fixture(scope="module")
def models():
    return {name: our_model(name, TINY) for name in OURS}


def test_the_models_have_equally_many_weights_apart_from_those_of_flurka(models):
    counts = {name: sum(weight.numel() for weight in model.parameters()) for name, model in models.items()}
    llama_count = sum(weight.numel() for weight in llama(TINY).parameters())
    padded = models["softmax"].settings.padded_vocab_size - decoding.TOKENIZER.vocab_size
    assert counts["softmax"] == llama_count + padded * TINY.width
    assert counts["softmax"] < counts["flurka"] < 1.2 * counts["softmax"]


def test_a_recurrent_state_does_not_grow_with_the_prompt_and_a_cache_does(models):
    short, long = (DecodingCase(TINY, batch=2, length=length) for length in (128, 256))
    assert our_session(models["flurka"], short).state_bytes == our_session(models["flurka"], long).state_bytes
    for case in (short, long):
        assert (
            our_session(models["softmax"], case).state_bytes
            == baseline_session(llama(TINY), case).state_bytes
        )
        assert case.cache_bytes == 2 * case.length * 2 * 32 * 4


def test_a_case_gives_one_row_per_table(models, monkeypatch):
    monkeypatch.setattr(decoding, "TURN_TOKENS", 8)
    case = DecodingCase(TINY, batch=2, length=128)
    costs = measure(case, models, llama(TINY), turns=1)
    assert all(min(cost.generate, cost.step) > 0 for cost in costs.values())
    lines = decoding.rows(case, 9_000_000, costs)
    text = decoding.page([lines], "command", cases=2).splitlines()
    assert "The first 1 of 2 cases." in text
    columns = next(line for line in text if line.startswith("| parameters"))
    assert all(line in text and line.count("|") == columns.count("|") for line in lines)


def test_a_row_has_throughput_and_the_speed_relative_to_the_baseline():
    times = {BASELINE: (0.02, 0.01), "flurka": (0.02, 0.02), "softmax": (0.04, 0.005)}
    costs = {name: Costs(*both, 2**20) for name, both in times.items()}
    generate, step = decoding.rows(DecodingCase(TINY, 8, 1024), 900_000, costs)
    assert generate == "| 0.9M | 8 | 1,024 | 400 | 400 | 200 | 1.00 | 2.00 | 1,024 | 1,024 |"
    assert step == "| 0.9M | 8 | 1,024 | 800 | 400 | 1,600 | 2.00 | 0.50 | 1,024 | 1,024 |"


def test_caches_that_are_too_large_are_reported_but_not_measured(models, monkeypatch):
    monkeypatch.setattr(decoding, "TURN_TOKENS", 2)
    monkeypatch.setattr(decoding, "MAX_CACHE_BYTES", 2**10)
    case = DecodingCase(TINY, batch=1, length=128)
    costs = measure(case, models, llama(TINY), turns=1)
    assert costs[BASELINE] == costs["softmax"] == Costs(None, None, case.cache_bytes)
    assert costs["flurka"].step > 0
    assert decoding.rows(case, 1, costs)[0].count("—") == 4

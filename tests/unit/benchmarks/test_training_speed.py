"""Rows of the page of training speeds, and that both models have the same size."""

import math

from benchmarks.training_speed import (
    BASELINE,
    WITH_COMPILED,
    StepSizes,
    Turn,
    baseline_step,
    configuration,
    llama,
    page,
    row,
)
from megakernel.model.parameters import parameter_count

TINY = StepSizes(length=16, batch_size=2, layers=1, width=32, heads=2, inner=64, vocab_size=128)


def test_a_row_has_speeds_and_ratios_to_the_baseline():
    sizes = StepSizes(length=4096, batch_size=1)
    seconds = {BASELINE: 2.0, "softmax": 2.0, "flurka": 0.5}
    found = {
        model: [Turn(duration * factor, 1.0) for factor in (9, 1, 1)] for model, duration in seconds.items()
    }
    line = row(sizes, found)
    assert line == "| 4,096 | 2,048 | 2,048 | 8,192 | 1.00 (1) | 4.00 (2) |"
    assert line in page([line], sizes, "command").splitlines()


def test_compiled_models_have_columns_of_their_own():
    sizes = StepSizes(length=4096, batch_size=1)
    seconds = {BASELINE: 2.0, "softmax": 2.0, "flurka": 0.5, "softmax compiled": 1.0, "flurka compiled": 0.25}
    line = row(sizes, {model: [Turn(duration, 1.0)] for model, duration in seconds.items()})
    assert line == ("| 4,096 | 2,048 | 2,048 | 8,192 | 4,096 | 16,384 | 1.00 (1) | 4.00 (2) | 2.00 | 8.00 |")
    columns = page([line], sizes, "command", WITH_COMPILED).splitlines()[-3]
    assert columns.endswith("| softmax (target) | FLuRKA (target) | softmax, compiled | FLuRKA, compiled |")
    assert list(WITH_COMPILED) == list(seconds)
    compiled = configuration("flurka compiled", TINY)
    assert (compiled.training.compile, configuration("flurka", TINY).training.compile) == ("layer", "none")
    assert compiled.model == configuration("flurka", TINY).model


def test_both_models_have_equally_many_weights():
    own = parameter_count(configuration("softmax", TINY).model, TINY.vocab_size, TINY.length)
    assert own == sum(weight.numel() for weight in llama(TINY).parameters())


def test_the_baseline_learns():
    step = baseline_step(TINY)
    losses = [step() for _ in range(4)]
    assert abs(losses[0] - math.log(TINY.vocab_size)) < 0.2
    assert losses[-1] < losses[0]

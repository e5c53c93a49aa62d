"""The compiled kernels, without a GPU: spills are small, and no operand is overwritten while a product reads it."""

import json

import pytest

from tests.kernels.compiled import without_interpreter

pytestmark = pytest.mark.second

HEAVIEST = (
    "FLuRKA hedgehog d=128",
    "FLuRKA hedgehog d=128, W in float32",
    "FLuRKA hedgehog d=128, composed",
    "kernel_attention hedgehog d=128",
    "kernel_attention favor d=128",
    "weighted_attention gaussian d=128",
)
"""Cases whose kernels have most registers; `python -m benchmarks.kernels.resources` compiles all."""


def test_the_heaviest_kernels_keep_to_the_limits_of_an_h100_and_have_no_race():
    done = without_interpreter("benchmarks.kernels.resources", "--gpu", "90", "--only", *HEAVIEST)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 20


def test_a_pipelined_operand_that_is_overwritten_too_early_is_found():
    # If a newer Triton gives it enough buffers, these are zeros: then `features.project` may be pipelined for all maps.
    done = without_interpreter("tests.kernels.racing")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, 1, 1]

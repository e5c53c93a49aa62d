"""The compiled kernels, without a GPU: the committed table is up to date, spills are small, and no operand is
overwritten while a product reads it."""

import json

import pytest

from tests.kernels.compiled import without_interpreter

pytestmark = pytest.mark.second


def test_kernels_compile_for_both_gpus_as_in_the_table_without_large_spills():
    # Checks that the rows are those of the current kernels and launches, and recompiles a sample of 8.
    done = without_interpreter("benchmarks.kernel_resources", "--check", "--sample", "8")
    assert done.returncode == 0, done.stderr


def test_a_pipelined_operand_that_is_overwritten_too_early_is_found():
    # If a newer Triton gives it enough buffers, these are zeros: then `features.project` may be pipelined for all maps.
    done = without_interpreter("tests.kernels.racing")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, 1, 1]

"""Resources of the compiled kernels, without a GPU: the committed table is up to date, and spills are small."""

import pytest

from tests.kernels.compiled import without_interpreter

pytestmark = pytest.mark.second


def test_kernels_compile_for_both_gpus_as_in_the_table_without_large_spills():
    # Checks that the rows are those of the current kernels and launches, and recompiles a sample of 8.
    done = without_interpreter("benchmarks.kernel_resources", "--check", "--sample", "8")
    assert done.returncode == 0, done.stderr

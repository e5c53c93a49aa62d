"""What kernels take of GPUs that need not be there: the committed table is true, and nothing spills much."""

import pytest

from tests.kernels.compiled import without_interpreter

pytestmark = pytest.mark.second


def test_kernels_compile_for_both_gpus_without_large_spills_to_what_the_table_says():
    # Every row is of the kernels and launches that are here; that it says what they compile to, a few stand for.
    done = without_interpreter("benchmarks.kernel_resources", "--check", "--sample", "8")
    assert done.returncode == 0, done.stderr

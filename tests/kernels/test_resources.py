"""What kernels take of GPUs that need not be there: the committed table is true, and nothing spills much."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.second

REPOSITORY = Path(__file__).parents[2]


def test_kernels_compile_for_both_gpus_without_large_spills_to_what_the_table_says():
    # Every row is of the kernels and launches that are here; that it says what they compile to, a few stand for. In a
    # process of its own: the interpreter's kernels cannot be compiled.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.kernel_resources", "--check", "--sample", "8"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

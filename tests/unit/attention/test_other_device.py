"""Every mechanism trains on a device that is not the CPU, and the host rarely waits for it."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from tests.unit.attention.mechanisms import DIRECTIONS
from tests.unit.attention.other_device import LAYERS

pytestmark = pytest.mark.second  # two minutes: two fake layers of every mechanism

WAITS = {
    # Without kernels; with them, see `partial_output.kernels_check`.
    "ops/partial_output.py:recompute_lost",
    # Blocks of packed softmax; a GPU has kernels for it.
    "ops/softmax_attention/spans.py:_limits",
    # EVA's noise depends on the number of chunks of the longest document.
    "papers/flurka/eva.py:noise",
    "papers/flurka/eva.py:keys_of_windows",
}
"""Where the host may wait in every layer."""


@pytest.fixture(scope="module")
def results():
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.attention.other_device"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {(line["name"], line["causal"]): line for line in lines}


def test_no_mechanism_mixes_devices(results):
    assert list(results) == DIRECTIONS
    problems = [
        f"{name}, causal={causal}: {x['problem']}" for (name, causal), x in results.items() if "problem" in x
    ]
    assert not problems, "\n".join(problems)


def test_the_host_waits_for_a_layer_only_where_it_is_known(results):
    for key, result in results.items():
        places = Counter(result["waits"])
        assert places.keys() <= WAITS, key
        # The tables of positions are made once for all layers.
        assert places["ops/partial_output.py:recompute_lost"] in (0, LAYERS), key


def test_a_wait_is_seen(results):
    assert results["linear", True]["waits"]

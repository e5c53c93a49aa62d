"""Python and torch do no more work around the kernels than benchmarks/results/kernel_host.md says."""

import re
from pathlib import Path

import pytest

from benchmarks.kernels.host import LAYERS
from tests.kernels.compiled import REPOSITORY, without_interpreter

pytestmark = pytest.mark.second

SAID = REPOSITORY / "benchmarks" / "results" / "kernel_host.md"

Cells = dict[str, list[list[str]]]
"""Layer -> the cells after its name, in each table."""


def cells_of(page: Path) -> Cells:
    found: Cells = {name: [] for name in LAYERS}
    for line in page.read_text().splitlines():
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if name in found:
            found[name].append(cells)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Cells:
    page = tmp_path_factory.mktemp("host") / "page.md"
    done = without_interpreter("benchmarks.kernels.host", "--out", str(page))
    assert done.returncode == 0, done.stderr
    return cells_of(page)


@pytest.mark.parametrize("name", LAYERS)
def test_counts_of_torch_operations_and_compiled_kernels_match_the_page(found, name):
    (counts, compiled, bound), (counts_said, compiled_said, bound_said) = found[name], cells_of(SAID)[name]
    assert bound[0] == bound_said[0]
    assert counts[:5] == counts_said[:5]
    assert compiled == compiled_said


def test_sequences_of_all_lengths_share_compiled_kernels(found):
    counts = [int(count) for _, (kernels,), _ in found.values() for count in re.findall(r" (\d+)", kernels)]
    assert max(counts) <= 4


def test_few_torch_operations_surround_the_kernels(found):
    # Each operation costs the host microseconds, on sequences of every length.
    for forward, backward, *_ in (counts for counts, *_ in found.values()):
        assert int(forward) <= 20
        assert int(backward) <= 25

"""Counted costs of the papers' models, and the committed page."""

from pathlib import Path

import pytest

from benchmarks.experiments.runs import make_run
from benchmarks.experiments.study import read_study
from benchmarks.paper_costs import TABLES, TEXT, cost_row, page

PAGE = Path(__file__).parents[3] / "benchmarks" / "results" / "paper_costs.md"


def cells(name, task="retrieval"):
    row = cost_row(name, make_run(read_study("lra_mgk"), name, task, 0).config, vocab_size=257)
    return [float(cell.replace(",", "")) for cell in row.strip("| ").split(" | ")[1:]]


def test_half_the_heads_with_two_keys_save_what_the_paper_counts():
    """Transformer-MGK, appendix B.2, here with biases and an output as wide as the input, in each of two layers."""
    heads, width, inputs = 8, 32, 64
    matrices = heads * width * inputs + heads * width * inputs // 2
    biases, priors = heads * width, heads
    softmax, mixture = cells("softmax-8"), cells("mgk-4")
    assert softmax[1] - mixture[1] == 2 * (matrices + biases - priors)
    assert softmax[2] - mixture[2] == softmax[1] - mixture[1]
    # B.1: N^2 H (4 D - 1) against N^2 H (3 D - 1/2) operations dominate.
    assert mixture[4] / softmax[4] == pytest.approx(0.75, abs=0.005)


def test_an_example_of_two_documents_and_a_step_of_32_are_counted():
    _, _, _, token, example, step = cells("softmax-1")
    assert example == pytest.approx(token * 1e6 * 2 * 4000 / 1e9, rel=1e-3)
    assert step == pytest.approx(3 * 32 * example / 1e3, rel=1e-3)


@pytest.mark.second  # builds every model
def test_the_committed_page_has_the_counts_of_today():
    lines = PAGE.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert TEXT.strip() in PAGE.read_text()
    for section in TABLES:
        assert f"## {section.title}" in lines
    # The command and the machine of the second line differ.
    assert [line for line in page("").splitlines() if line.startswith("| ")] == [
        line for line in lines if line.startswith("| ")
    ]

"""The sequences of the sparsity task, checked by adding them up."""

from collections import Counter
from itertools import accumulate

import pytest

from data_pipeline.document import Document
from data_pipeline.papers.generated import generate_examples
from data_pipeline.papers.sparsity import Sparsity
from data_pipeline.prepare import open_source


@pytest.fixture(scope="module", params=[0.1, 0.5, 0.9])
def rows(request: pytest.FixtureRequest) -> tuple[float, list[Document]]:
    return request.param, generate_examples(Sparsity(p=request.param), 5, ("train", range(180)))


def pairs(document: Document) -> list[tuple[int, int]]:
    """Value v and flag a of each symbol."""
    return [({"+": 1, "-": -1}[symbol[0]], int(symbol[1:])) for symbol in document.texts[0].split(" ")]


def test_the_label_is_the_sum_and_every_prefix_stays_within_bounds(rows: tuple[float, list[Document]]):
    for document in rows[1]:
        sums = list(accumulate(value * flag for value, flag in pairs(document)))
        assert len(sums) == 200
        assert sums[-1] == document.label
        assert max(map(abs, sums)) <= 4


def test_classes_are_balanced(rows: tuple[float, list[Document]]):
    assert Counter(document.label for document in rows[1]) == dict.fromkeys(range(-4, 5), 20)


def test_the_fraction_of_counted_pairs_is_p(rows: tuple[float, list[Document]]):
    p, documents = rows
    flags = [flag for document in documents for _, flag in pairs(document)]
    # 36,000 flags: a standard deviation of at most 0.0026. Selecting sequences by their sum shifts the mean far less.
    assert sum(flags) / len(flags) == pytest.approx(p, abs=0.01)
    ignored = [value for document in documents for value, flag in pairs(document) if not flag]
    assert sum(ignored) / len(ignored) == pytest.approx(0.0, abs=0.08)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("p=1.5", r"p=1.5 should be less than 1"),
        ("length=12", r"length=12 has too few pairs that count; set 19 or more"),
    ],
)
def test_invalid_options_are_refused(options: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        open_source([f"sparsity:{options}"])

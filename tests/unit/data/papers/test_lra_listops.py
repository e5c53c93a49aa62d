"""The ListOps generator against the published rules, checked by an independent parser."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from data_pipeline import tokenizers
from data_pipeline.document import Document
from data_pipeline.labels import read_labels
from data_pipeline.papers.generated import generate_examples
from data_pipeline.papers.lra import listops
from data_pipeline.papers.lra.listops import ListOps
from data_pipeline.prepare import open_source
from tests.unit.data.conftest import prepared

MAX_DEPTH = 10


def median(values: list[int]) -> int:
    ordered = sorted(values)
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    return sum(middle) // len(middle)


OPERATORS = {"[MIN": min, "[MAX": max, "[MED": median, "[SM": lambda values: sum(values) % 10}


def nodes(text: str) -> Iterator[tuple[int, str, list[int]]]:
    """Depth, symbol and arguments' values of each node, children first; the last one is the root."""
    stack: list[tuple[str, list[int]]] = [("root", [])]
    for symbol in text.split():
        if symbol in OPERATORS:
            stack.append((symbol, []))
            continue
        if symbol == "]":
            operator, values = stack.pop()
            yield len(stack), operator, values
            value = int(OPERATORS[operator](values))
        else:
            yield len(stack), symbol, []
            value = int(symbol)
        stack[-1][1].append(value)
    [(_, [value])] = stack
    yield 0, "root", [value]


def value_of(text: str) -> int:
    return list(nodes(text))[-1][2][0]


def examples(task: ListOps, count: int, first: int = 0) -> list[Document]:
    return generate_examples(task, 3, ("train", range(first, first + count)))


@pytest.fixture(scope="module")
def published() -> list[Document]:
    return examples(ListOps(), 300)


def test_lengths_are_within_the_published_bounds(published: list[Document]):
    lengths = [len(document.texts[0].split()) for document in published]
    assert min(lengths) > 500
    assert max(lengths) < 2000
    assert max(lengths) - min(lengths) > 1000, "short and long examples occur"


def test_labels_are_the_values_of_the_expressions(published: list[Document]):
    assert [value_of(document.texts[0]) for document in published] == [
        document.label for document in published
    ]


def test_no_operator_is_at_the_greatest_depth(published: list[Document]):
    seen = [node for document in published for node in nodes(document.texts[0])]
    assert max(depth for depth, _, _ in seen) == MAX_DEPTH
    assert max(depth for depth, symbol, _ in seen if symbol in OPERATORS) == MAX_DEPTH - 1


def test_every_class_occurs_and_0_and_9_are_the_most_frequent(published: list[Document]):
    """Minima and maxima of many arguments are mostly 0 and 9; the rules do not balance classes."""
    share = Counter(document.label for document in published)
    assert sorted(share) == list(range(10))
    assert min(share[0], share[9]) > max(share[label] for label in range(1, 9))


def test_nodes_follow_the_published_distribution():
    """Measured on expressions of any length, because selecting by length would bias the sample of nodes."""
    unfiltered = examples(ListOps(min_length=0, max_length=10**6), 2500)
    drawn = [node for document in unfiltered for node in nodes(document.texts[0])]
    free = [symbol for depth, symbol, _ in drawn if 0 < depth < MAX_DEPTH]
    operators = Counter(symbol for symbol in free if symbol in OPERATORS)
    # About 10^5 nodes below the root: a share's standard deviation is below 0.002. They are not quite independent.
    assert len(free) > 50_000
    assert operators.total() / len(free) == pytest.approx(0.25, abs=0.01)
    for operator in OPERATORS:
        assert operators[operator] / operators.total() == pytest.approx(0.25, abs=0.015)
    arguments = Counter(len(values) for _, symbol, values in drawn if symbol in OPERATORS)
    assert sorted(arguments) == list(range(2, 11))
    for count in arguments.values():
        assert count / arguments.total() == pytest.approx(1 / 9, abs=0.01)
    digits = Counter(symbol for _, symbol, _ in drawn if symbol.isdecimal())
    for count in digits.values():
        assert count / digits.total() == pytest.approx(0.1, abs=0.01)


def test_an_example_depends_only_on_seed_split_and_index():
    task = ListOps(min_length=5, max_length=50)
    assert examples(task, 6)[4:] == examples(task, 2, first=4)
    assert generate_examples(task, 4, ("train", range(6))) != examples(task, 6)
    other = [document.texts for document in generate_examples(task, 3, ("test", range(6)))]
    assert other != [document.texts for document in examples(task, 6)]


def test_the_number_of_processes_changes_no_example():
    spec = ["lra:listops:train=230,validation=3,test=2,min_length=5,max_length=50"]
    one, two = (list(open_source(spec, seed=1, workers=workers)) for workers in (1, 2))
    assert one == two
    assert Counter(document.split for document in one) == {"train": 230, "validation": 3, "test": 2}


def test_bounds_that_hardly_any_expression_meets_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listops, "DRAWS", 1000)
    # The longest expression of depth 3 has 122 tokens.
    with pytest.raises(ValueError, match=r"of 1,000 random expressions none has more than 115 and less than"):
        examples(ListOps(max_depth=3, min_length=115), 1)


@pytest.mark.second
def test_each_symbol_is_one_token(tmp_path: Path):
    source = "lra:listops:train=40,validation=8,test=6,min_length=5,max_length=50"
    manifest = prepared(tmp_path / "out", [source], tokenizer="words", seed=3)
    assert {name: split.documents for name, split in manifest.splits.items()} == {
        "train": 40,
        "validation": 8,
        "test": 6,
    }
    tokenizer = tokenizers.load(tmp_path / "out" / "tokenizer")
    assert tokenizer.vocab_size == 17, "15 symbols, the end and the unknown symbol"
    wanted = examples(ListOps(min_length=5, max_length=50), 40)
    for row, document in zip(IndexedDataset(str(tmp_path / "out" / "train")), wanted):
        assert tokenizer.decode(row.tolist()) == document.texts[0]
        assert len(row) == len(document.texts[0].split()) + 1
    assert manifest.labels is not None
    classes = [manifest.labels.classes[label] for label in read_labels(tmp_path / "out", "train")]
    assert classes == [document.label for document in wanted]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("trian=5", r"lra:listops:trian=5: lra:listops has no option trian; choose train"),
        ("train=many", r"train=many should be a valid integer.*Examples of the split"),
        ("train=0", r"train=0 should be greater than or equal to 1"),
        ("max_args=1", r"max_args=1 should be greater than or equal to 2"),
        ("max_depth=2", r"min_length=500 is more than depth 2 reaches; set less than 12"),
        ("max_length=505", r"max_length=505 leaves too few lengths; set 510 or more"),
    ],
)
def test_invalid_options_are_refused(options: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        open_source([f"lra:listops:{options}"])

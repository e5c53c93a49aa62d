"""GLUE from the published files and from the hub."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from data_pipeline.document import Document
from data_pipeline.labels import read_labels
from data_pipeline.papers.glue import TASKS
from data_pipeline.prepare import open_source
from tests import published
from tests.unit.data.conftest import prepared

EOD = 256
LABELS = {"stsb": {0.0, 2.5, 5.0}, "mnli": {"entailment", "neutral", "contradiction"}}
LABELS |= {task: {"entailment", "not_entailment"} for task in ("qnli", "rte")}


@pytest.mark.parametrize("task", TASKS)
def test_sentences_and_labels_of_every_task_are_found(task: str, tmp_path: Path):
    documents = list(open_source([f"glue:{task}:{published.glue(tmp_path / task, task)}"]))
    splits = TASKS[task].splits
    assert Counter(document.split for document in documents) == dict.fromkeys(splits.values(), 6)
    assert {document.label for document in documents} == LABELS.get(task, {0, 1})
    for document in documents:
        assert len(document.texts) == len(TASKS[task].texts)
        file = next(name for name, split in splits.items() if split == document.split)
        assert all(text.startswith(f'{file} "') for text in document.texts), "quotes are part of the text"


def test_two_sentences_are_one_sequence_with_an_end_after_each(tmp_path: Path):
    folder = published.glue(tmp_path / "RTE", "rte")
    manifest = prepared(tmp_path / "out", [f"glue:rte:{folder}"])
    assert manifest.labels is not None
    assert (manifest.labels.documents, manifest.labels.classes) == (1, ["entailment", "not_entailment"])
    first = next(iter(open_source([f"glue:rte:{folder}"])))
    rows = IndexedDataset(str(tmp_path / "out" / "train"))  # a row is a view of its file
    assert rows[0].tolist() == [*first.texts[0].encode(), EOD, *first.texts[1].encode(), EOD]


def test_labels_of_a_regression_stay_numbers(tmp_path: Path):
    manifest = prepared(tmp_path / "out", [f"glue:stsb:{published.glue(tmp_path / 'STS-B', 'stsb')}"])
    assert manifest.labels is not None
    assert manifest.labels.classes == []
    labels = read_labels(tmp_path / "out", "validation")
    assert labels.dtype == np.float32
    assert labels.tolist() == [0.0, 2.5, 5.0] * 2


def test_labels_that_are_not_finite_are_skipped(tmp_path: Path):
    folder = published.glue(tmp_path / "STS-B", "stsb")
    lines = (folder / "train.tsv").read_text().splitlines()
    added = [lines[1].rpartition("\t")[0] + f"\t{label}" for label in ("nan", "inf", "1e999")]
    (folder / "train.tsv").write_text("\n".join([*lines, *added]) + "\n")
    source = open_source([f"glue:stsb:{folder}"])
    assert Counter(document.split for document in source)["train"] == 6
    assert source.skipped == {"no labeled sentences": 3}


def test_a_task_without_training_examples_is_refused(tmp_path: Path):
    folder = published.glue(tmp_path / "RTE", "rte")
    header = (folder / "train.tsv").read_text().splitlines()[0]
    (folder / "train.tsv").write_text(header + "\n")
    with pytest.raises(ValueError, match=r"--source glue:rte:.* has no example to train on; give all of its"):
        prepared(tmp_path / "out", [f"glue:rte:{folder}"])


def test_lines_without_an_agreed_label_are_skipped(tmp_path: Path):
    folder = published.glue(tmp_path / "MNLI", "mnli")
    lines = (folder / "train.tsv").read_text().splitlines()
    (folder / "train.tsv").write_text(
        "\n".join([*lines, lines[1].rpartition("\t")[0] + "\t-", "half a line"]) + "\n"
    )
    source = open_source([f"glue:mnli:{folder}"])
    assert Counter(document.split for document in source)["train"] == 6
    assert source.skipped == {"no labeled sentences": 2}


@pytest.mark.parametrize(("task", "label"), [("mnli", 2), ("stsb", 3.5)])
def test_the_hubs_names_of_columns_and_splits_are_read(task: str, label: float, tmp_path: Path):
    layout = TASKS[task]
    card = ["---", "configs:", "- config_name: default", "  data_files:"]
    for split in layout.splits.values():
        row = {text: f"{split} {text}" for text in layout.hub_texts} | {"label": label}
        name = layout.hub_splits.get(split, split)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        card += [f"  - split: {name}", f"    path: {name}.jsonl"]
    # From the file names alone, `datasets` would merge the two validation splits of MNLI.
    (tmp_path / "README.md").write_text("\n".join([*card, "---", ""]))
    documents = list(open_source([f"glue:{task}:hf:{tmp_path}"]))
    assert documents == [
        Document(tuple(f"{split} {text}" for text in layout.hub_texts), label, split, True)
        for split in layout.splits.values()
    ]


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("glue:stsb:nowhere", r"glue:stsb:nowhere has no train.tsv; give the task's folder of GLUE"),
        ("glue:sst:x", r"--source glue:sst:x is not a task; choose glue:sst2,"),
        ("glue:rte", r"--source glue:rte needs to know where the data is"),
    ],
)
def test_missing_data_and_unknown_tasks_are_refused(spec: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        open_source([spec])


def test_files_of_another_task_are_refused(tmp_path: Path):
    folder = published.glue(tmp_path / "RTE", "rte")
    with pytest.raises(ValueError, match=r"train.tsv has no column 'question' among index, sentence1"):
        list(open_source([f"glue:qnli:{folder}"]))

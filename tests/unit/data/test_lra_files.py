"""Text, Retrieval and Image from files in their published form."""

import json
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.document import Columns, Document
from data_pipeline.prepare import open_source
from data_pipeline.tokenizers import PixelTokenizer, load
from megakernel.config.errors import UserError
from tests import published
from tests.hostile import Harm
from tests.unit.data.conftest import prepared


def by_split(documents: list[Document]) -> dict[str | None, int]:
    return dict(Counter(document.split for document in documents))


def test_reviews_keep_their_split_and_the_arena_validates_on_the_test_set(tmp_path: Path):
    documents = list(open_source([f"lra:text:{published.imdb(tmp_path / 'aclImdb')}"]))
    assert by_split(documents) == {"train": 8, "validation": 8}
    for document in documents:
        split, label = document.texts[0].split(":")[0].split()
        assert (split == "train") == (document.split == "train")
        assert document.label == ["neg", "pos"].index(label)


def test_reviews_of_the_hub_are_those_of_its_splits(tmp_path: Path):
    for split in ("train", "test"):
        rows = [{"text": f"{split} {number}", "label": number % 2} for number in range(4)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    documents = list(open_source([f"lra:text:hf:{tmp_path}"]))
    assert by_split(documents) == {"train": 4, "validation": 4}
    assert documents[-1] == Document(("test 3",), 1, "validation")


def test_published_expressions_are_those_that_are_made(tmp_path: Path):
    folder, written = published.listops(tmp_path / "listops-1000")
    with (folder / "basic_test.tsv").open("a") as lines:
        lines.write("( ( [MAX 1 ) ] )\tnone\n1 2 3\n")
    source = open_source([f"lra:listops:{folder}"])
    documents = list(source)
    assert by_split(documents) == {"train": 6, "validation": 6, "test": 6}
    made = [document for split in ("train", "val", "test") for document in written[split]]
    assert [(row.texts, row.label) for row in documents] == [(row.texts, row.label) for row in made]
    assert source.skipped == {"no expression with its value": 2}
    assert "(" in (folder / "basic_train.tsv").read_text()
    assert source.classes == tuple(range(10)), "whether or not each occurs"


def test_expressions_are_made_or_read(tmp_path: Path):
    folder, _ = published.listops(tmp_path / "with=sign")
    assert len(list(open_source([f"lra:listops:{folder}"]))) == 18
    made = open_source(["lra:listops:train=3,validation=0,test=0,min_length=5,max_length=60"])
    assert len(list(made)) == 3
    (folder / "basic_val.tsv").unlink()
    for where, missing in ((folder, "basic_val.tsv"), (tmp_path / "nowhere", "basic_train.tsv")):
        with pytest.raises(UserError, match=f"lra:listops:{where} has no {missing}; give the folder"):
            open_source([f"lra:listops:{where}"])


def test_a_table_between_tabs_has_labels(tmp_path: Path):
    folder, written = published.listops(tmp_path / "listops-1000")
    file = folder / "basic_train.tsv"
    columns = Columns(("Source",), "Target")
    documents = list(open_source([str(file)], columns=columns))
    assert [row.label for row in documents] == [row.label for row in written["train"]]
    assert documents[0].texts[0].startswith("( "), "the column as it is written"
    of_two = open_source([str(file)], columns=Columns(label="Target"))
    assert list(of_two) == documents, "the column that is no label is the text"
    (tmp_path / "three.tsv").write_bytes(
        b'id\tSource\tTarget\r\n1\ta "b\tyes\r\n2\t\xff\tno\r\n3\tc\t\r\n4\td\tno\n'
    )
    source = open_source([str(tmp_path / "three.tsv")], columns=columns)
    assert list(source) == [Document(('a "b',), "yes"), Document(("d",), "no")]
    assert source.skipped == {"no labelled row": 2}
    for wanted, option in ((Columns(("text",), "Target"), "text-key"), (Columns(("Source",), "x"), "labels")):
        source = open_source([str(tmp_path / "three.tsv")], columns=wanted)
        with pytest.raises(UserError, match=f"no column '.*' among id, Source, Target; set --{option}"):
            list(source)


def test_without_labels_a_table_between_tabs_is_a_text(tmp_path: Path):
    (tmp_path / "a.tsv").write_text("a\tb\n")
    source = open_source([str(tmp_path / "a.tsv")])
    assert list(source) == [Document(("a\tb\n",))]


def test_pairs_of_papers_are_two_documents(tmp_path: Path):
    folder = published.aan(tmp_path / "tsv_data")
    with (folder / "new_aan_pairs.test.tsv").open("a") as lines:
        lines.write("a line of something else\n")
    source = open_source([f"lra:retrieval:{folder}"])
    documents = list(source)
    assert by_split(documents) == {"train": 4, "validation": 4, "test": 4}
    assert source.skipped == {"no pair of papers": 1}
    assert [document.label for document in documents] == [0, 1, 0, 1] * 3
    assert documents[4].texts[0].startswith("eval ")
    assert documents[4].texts[1].startswith('"'), "quotes are text"
    manifest = prepared(tmp_path / "out", [f"lra:retrieval:{folder}"])
    assert manifest.labels is not None
    assert (manifest.labels.documents, manifest.labels.classes) == (2, [0, 1])
    assert manifest.splits["test"].documents == 8


def test_images_are_gray_and_the_last_tenth_of_training_is_for_validation(tmp_path: Path):
    folder = published.cifar(tmp_path / "cifar-10-batches-py")
    documents = list(open_source([f"lra:image:{folder}"]))
    assert by_split(documents) == {"train": 45, "validation": 5, "test": 10}
    colors = pickle.loads((folder / "test_batch").read_bytes())[b"data"][0].reshape(3, 1024)
    exact = 0.2989 * colors[0] + 0.587 * colors[1] + 0.114 * colors[2]
    first = next(document for document in documents if document.split == "test")
    gray = PixelTokenizer().encode(first.texts[0])
    assert len(gray) == 1024
    assert np.abs(np.array(gray) - exact).max() <= 0.5
    prepared(tmp_path / "out", [f"lra:image:{folder}"], tokenizer="pixels")
    tokenizer = load(tmp_path / "out" / "tokenizer")
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.hash) == ("pixels", 257, PixelTokenizer().hash)


def test_a_pickle_that_names_a_function_is_refused(tmp_path: Path):
    folder = published.cifar(tmp_path / "cifar")
    (folder / "test_batch").write_bytes(pickle.dumps({b"data": Harm(tmp_path / "harmed")}))
    with pytest.raises(ValueError, match=r"test_batch is no batch of CIFAR-10 \(it names "):
        list(open_source([f"lra:image:{folder}"]))
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("lra:text:nowhere", r"nowhere has no train/neg/\*.txt; give the folder aclImdb"),
        ("lra:retrieval:nowhere", r"has no new_aan_pairs.train.tsv; give the folder tsv_data"),
        ("lra:image:nowhere", r"has no data_batch_1; give the folder cifar-10-batches-py"),
        ("lra:text", r"needs to know where the data is; write lra:text:FOLDER"),
        ("lra:txet", r"--source lra:txet is not a task; choose lra:text,"),
    ],
)
def test_what_is_not_there_is_refused(spec: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        open_source([spec])


def test_text_is_no_image():
    with pytest.raises(ValueError, match=r"--tokenizer pixels reads images, and a text holds '漢'"):
        PixelTokenizer().encode("漢")

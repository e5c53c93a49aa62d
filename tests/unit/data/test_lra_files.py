"""Text, Retrieval and Image from files in their published form."""

import json
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.document import Columns, Document
from data_pipeline.sources import Source, open_source
from data_pipeline.tokenizers import PixelTokenizer, load
from tests import published
from tests.unit.data.conftest import prepared


def opened(spec: str) -> Source:
    return open_source([spec], columns=Columns(), split="train", include=[])


def by_split(documents: list[Document]) -> dict[str | None, int]:
    return dict(Counter(document.split for document in documents))


def test_reviews_keep_their_split_and_the_arena_validates_on_the_test_set(tmp_path: Path):
    documents = list(opened(f"lra:text:{published.imdb(tmp_path / 'aclImdb')}"))
    assert by_split(documents) == {"train": 8, "validation": 8}
    for document in documents:
        split, label = document.texts[0].split(":")[0].split()
        assert (split == "train") == (document.split == "train")
        assert document.label == ["neg", "pos"].index(label)


def test_reviews_of_the_hub_are_those_of_its_splits(tmp_path: Path):
    for split in ("train", "test"):
        rows = [{"text": f"{split} {number}", "label": number % 2} for number in range(4)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    documents = list(opened(f"lra:text:hf:{tmp_path}"))
    assert by_split(documents) == {"train": 4, "validation": 4}
    assert documents[-1] == Document(("test 3",), 1, "validation")


def test_pairs_of_papers_are_two_documents(tmp_path: Path):
    folder = published.aan(tmp_path / "tsv_data")
    with (folder / "new_aan_pairs.test.tsv").open("a") as lines:
        lines.write("a line of something else\n")
    source = opened(f"lra:retrieval:{folder}")
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
    documents = list(opened(f"lra:image:{folder}"))
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
    class Harm:
        def __reduce__(self):
            return Path.touch, (tmp_path / "harmed",)

    folder = published.cifar(tmp_path / "cifar")
    (folder / "test_batch").write_bytes(pickle.dumps({b"data": Harm()}))
    with pytest.raises(ValueError, match=r"test_batch is no batch of CIFAR-10 \(it names "):
        list(opened(f"lra:image:{folder}"))
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("lra:text:nowhere", r"nowhere has no train/neg/\*.txt; give the folder aclImdb"),
        ("lra:retrieval:nowhere", r"has no new_aan_pairs.train.tsv; give the folder tsv_data"),
        ("lra:image:nowhere", r"has no data_batch_1; give the folder cifar-10-batches-py"),
        ("lra:text", r"needs to know where the data is; write lra:text:FOLDER"),
        ("lra:txet", r"--source lra:txet is no task; choose lra:text,"),
    ],
)
def test_what_is_not_there_is_refused(spec: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        opened(spec)


def test_text_is_no_image():
    with pytest.raises(ValueError, match=r"--tokenizer pixels reads images, and a text holds '漢'"):
        PixelTokenizer().encode("漢")

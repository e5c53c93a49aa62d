import shutil
from pathlib import Path

import pytest

from data_pipeline.corpus import Corpora
from megakernel.config.data import Data
from tests.unit.data.conftest import documents, prepared, write_jsonl


@pytest.fixture
def copy(corpus: Path, tmp_path: Path) -> Path:
    """A copy of the corpus that a test may damage."""
    return Path(shutil.copytree(corpus, tmp_path / "copy"))


def message(data: Data, **options: bool) -> str:
    """What opening says; always one line."""
    with pytest.raises(ValueError, match=r"^data\.") as error:
        Corpora(data, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_open_corpus_knows_its_tokenizer_and_sizes(corpus: Path):
    corpora = Corpora(Data(train=corpus))
    assert (corpora.vocab_size, corpora.eod) == (257, 256)
    assert corpora.tokenizer.hash == corpora.tokenizer_hash
    record = corpora.train[0].record("train")
    assert record.tokens == record.bytes + record.documents
    assert corpora.bytes_per_token("train") == record.bytes / record.tokens


def test_bytes_per_token_of_a_blend_go_by_its_weights(corpus: Path, other_corpus: Path):
    one, other = (Corpora(Data(train=path)).bytes_per_token("validation") for path in (corpus, other_corpus))
    blend = Corpora(Data(train={str(corpus): 3, str(other_corpus): 1}))
    assert blend.bytes_per_token("validation") == pytest.approx(0.75 * one + 0.25 * other, rel=1e-12)


def test_a_missing_folder(tmp_path: Path):
    folder = tmp_path / "nothing"
    assert message(Data(train=folder)) == (
        f"data.train={folder} does not exist; make it with `megakernel prepare --out {folder}`"
    )


def test_a_folder_that_was_not_prepared(tmp_path: Path):
    assert message(Data(train=tmp_path)) == (
        f"data.train={tmp_path} has no manifest.json, so `megakernel prepare` did not make it; "
        "give a prepared folder, or prepare its text"
    )


@pytest.mark.parametrize("text", ["", "{", '{"format": 1}'])
def test_a_damaged_manifest(copy: Path, text: str):
    (copy / "manifest.json").write_text(text)
    said = message(Data(train=copy))
    assert said.startswith(f"data.train={copy / 'manifest.json'} is damaged (")
    assert said.endswith("; prepare the folder again")


@pytest.mark.parametrize("name", ["train.bin", "train.idx"])
def test_missing_token_files(copy: Path, name: str):
    (copy / name).unlink()
    assert message(Data(train=copy)) == (
        f"data.train={copy} lacks {name}; copy the folder from where it was prepared, or prepare it again"
    )


@pytest.mark.parametrize("name", ["train.bin", "train.idx"])
@pytest.mark.parametrize("kept", [0, 0.5])
def test_empty_and_truncated_token_files(copy: Path, name: str, kept: float):
    content = (copy / name).read_bytes()
    size = int(kept * len(content))
    (copy / name).write_bytes(content[:size])
    assert message(Data(train=copy)) == (
        f"data.train={copy} holds a truncated or foreign {name} ({size} bytes, not {len(content)}); "
        "copy the folder from where it was prepared, or prepare it again"
    )


def test_an_index_that_is_not_megatrons(copy: Path):
    (copy / "train.idx").write_bytes(b"\x00" * (copy / "train.idx").stat().st_size)
    assert message(Data(train=copy)).startswith(
        f"data.train={copy} holds a foreign train.idx; copy the folder"
    )


def test_damage_to_validation_names_the_key_it_came_from(corpus: Path, copy: Path):
    (copy / "validation.bin").unlink()
    assert message(Data(train=copy)).startswith(f"data.train={copy} lacks validation.bin")
    assert message(Data(train=corpus, validation=copy)).startswith(
        f"data.validation={copy} lacks validation.bin"
    )


def test_a_missing_validation_split_matters_only_to_evaluation(tmp_path: Path):
    source = write_jsonl(tmp_path / "source.jsonl", documents(5, seed=8))
    prepared(tmp_path / "out", [str(source)], validation_fraction=0.0)
    assert message(Data(train=tmp_path / "out")) == (
        f"data.train={tmp_path / 'out'} has no validation split; prepare it with one; "
        "or set training.eval_samples=0"
    )
    assert Corpora(Data(train=tmp_path / "out"), validation=False).validation == []


def test_corpora_of_two_tokenizers(corpus: Path, tmp_path: Path):
    source = write_jsonl(tmp_path / "source.jsonl", documents(30, seed=9))
    size = prepared(tmp_path / "bpe", [str(source)], tokenizer="bpe:300").tokenizer.vocab_size
    data = {
        "data.train": Data(train=[corpus, tmp_path / "bpe"]),
        "data.validation": Data(train=corpus, validation=tmp_path / "bpe"),
    }
    for key in data:
        assert message(data[key]) == (
            f"{key}={tmp_path / 'bpe'} was prepared with another tokenizer (huggingface, {size} ids) than "
            f"{corpus} (byte, 257 ids); prepare it with --tokenizer {corpus / 'tokenizer'}"
        )

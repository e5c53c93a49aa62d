import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.corpus import Corpora
from data_pipeline.manifest import FileRecord
from megakernel.config.data import Data
from tests.hostile import flip
from tests.unit.data.conftest import documents, prepared, write_jsonl


@pytest.fixture
def copy(corpus: Path, tmp_path: Path) -> Path:
    """A copy of the corpus that a test may damage."""
    return Path(shutil.copytree(corpus, tmp_path / "copy"))


def open_error(data: Data, **options: bool) -> str:
    """The error of opening the corpora, which is always one line."""
    with pytest.raises(ValueError, match=r"^data\.") as error:
        Corpora(data, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_opened_corpus_has_its_tokenizer_and_sizes(corpus: Path):
    corpora = Corpora(Data(train=corpus))
    assert (corpora.vocab_size, corpora.eod) == (257, 256)
    assert corpora.tokenizer.hash == corpora.tokenizer_hash
    record = corpora.train[0].record("train")
    assert record.tokens == record.bytes + record.documents
    assert corpora.bytes_per_token("train") == record.bytes / record.tokens


def test_bytes_per_token_of_a_blend_are_weighted(corpus: Path, other_corpus: Path):
    one, other = (Corpora(Data(train=path)).bytes_per_token("validation") for path in (corpus, other_corpus))
    blend = Corpora(Data(train={str(corpus): 3, str(other_corpus): 1}))
    assert blend.bytes_per_token("validation") == pytest.approx(0.75 * one + 0.25 * other, rel=1e-12)


def test_a_missing_folder_is_refused(tmp_path: Path):
    folder = tmp_path / "nothing"
    assert open_error(Data(train=folder)) == (
        f"data.train={folder} does not exist; make it with `megakernel prepare --source FOLDER --tokenizer byte --out "
        f"{folder}`, where FOLDER has your text"
    )


def test_a_folder_that_was_not_prepared_is_refused(tmp_path: Path):
    assert open_error(Data(train=tmp_path)) == (
        f"data.train={tmp_path} has no manifest.json, so `megakernel prepare` did not make it; "
        "give a prepared folder, or prepare its text"
    )


@pytest.mark.parametrize("text", ["", "{", '{"format": 1}'])
def test_a_damaged_manifest_is_refused(copy: Path, text: str):
    (copy / "manifest.json").write_text(text)
    error = open_error(Data(train=copy))
    assert error.startswith(f"data.train={copy / 'manifest.json'} is damaged (")
    assert error.endswith("; prepare the folder again")


@pytest.mark.parametrize("name", ["train.bin", "train.idx"])
def test_missing_token_files_are_refused(copy: Path, name: str):
    (copy / name).unlink()
    assert open_error(Data(train=copy)) == (
        f"data.train={copy} lacks {name}; copy the folder from where it was prepared, or prepare it again"
    )


@pytest.mark.parametrize("name", ["train.bin", "train.idx"])
@pytest.mark.parametrize("kept", [0, 0.5])
def test_empty_and_truncated_token_files_are_refused(copy: Path, name: str, kept: float):
    content = (copy / name).read_bytes()
    size = int(kept * len(content))
    (copy / name).write_bytes(content[:size])
    assert open_error(Data(train=copy)) == (
        f"data.train={copy} holds a truncated or foreign {name} ({size} bytes, not {len(content)}); "
        "copy the folder from where it was prepared, or prepare it again"
    )


def test_an_index_that_is_not_megatrons_is_refused(copy: Path):
    (copy / "train.idx").write_bytes(b"\x00" * (copy / "train.idx").stat().st_size)
    assert open_error(Data(train=copy)).startswith(
        f"data.train={copy} holds a foreign train.idx; copy the folder"
    )


def test_an_error_names_the_key_of_the_damaged_corpus(corpus: Path, copy: Path):
    (copy / "validation.bin").unlink()
    assert open_error(Data(train=copy)).startswith(f"data.train={copy} lacks validation.bin")
    assert open_error(Data(train=corpus, validation=copy)).startswith(
        f"data.validation={copy} lacks validation.bin"
    )


def test_a_missing_validation_split_matters_only_to_evaluation(tmp_path: Path):
    source = write_jsonl(tmp_path / "source.jsonl", documents(5, seed=8))
    prepared(tmp_path / "out", [str(source)], validation_fraction=0.0)
    assert open_error(Data(train=tmp_path / "out")) == (
        f"data.train={tmp_path / 'out'} has no validation split; prepare it with one; "
        "or set training.eval_samples=0"
    )
    assert len(Corpora(Data(train=tmp_path / "out"), validation=False).train) == 1


@pytest.mark.second
def test_a_split_is_opened_without_the_validation_split(tmp_path: Path):
    prepared(tmp_path / "out", ["lra:listops:train=9,validation=0,test=5"], tokenizer="words")
    corpora = Corpora(Data(train=tmp_path / "out"), validation=False)
    [corpus] = corpora.of_split("test")
    assert corpus.record("test").documents == 5
    with pytest.raises(ValueError, match="has no validation split; prepare it with one"):
        corpora.of_split("validation")


def test_corpora_of_two_tokenizers_are_refused(corpus: Path, tmp_path: Path):
    source = write_jsonl(tmp_path / "source.jsonl", documents(30, seed=9))
    size = prepared(tmp_path / "bpe", [str(source)], tokenizer="bpe:300").tokenizer.vocab_size
    data = {
        "data.train": Data(train=[corpus, tmp_path / "bpe"]),
        "data.validation": Data(train=corpus, validation=tmp_path / "bpe"),
    }
    for key in data:
        assert open_error(data[key]) == (
            f"{key}={tmp_path / 'bpe'} was prepared with another tokenizer (huggingface, {size} ids) than "
            f"{corpus} (byte, 257 ids); prepare it with --tokenizer {corpus / 'tokenizer'}"
        )


@pytest.fixture
def check_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the files that this machine has verified."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "validation.bin"])
@pytest.mark.parametrize("place", [0.4, 1.0])
def test_damage_that_keeps_the_file_size_is_detected(copy: Path, name: str, place: float):
    flip(copy / name, place)
    assert open_error(Data(train=copy)) == (
        f"data.train={copy} holds a damaged {name} (its SHA-256 is not that of the manifest); "
        "copy the folder from where it was prepared, or prepare it again"
    )


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read for their SHA-256, in order."""
    files: list[Path] = []
    of = FileRecord.of
    monkeypatch.setattr(
        FileRecord, "of", staticmethod(lambda file, look=None: files.append(file) or of(file, look))
    )
    return files


def test_a_corpus_is_verified_once(copy: Path, check_cache: Path, tmp_path: Path, read: list[Path]):
    Corpora(Data(train=copy))
    assert len(read) == 4, "both files of both splits"
    read.clear()
    Corpora(Data(train=copy))
    assert read == []
    assert not check_cache.exists(), "the marker is beside the data, for all machines and users"
    os.utime(copy / "train.bin")
    Corpora(Data(train=copy))
    assert copy / "train.bin" in read, "a file that was touched is read again"
    read.clear()
    again = Path(shutil.copytree(copy, tmp_path / "again"))
    Corpora(Data(train=again))
    assert len(read) == 4, "so is a copy, although the marker was copied, too"


def test_a_corpus_that_is_listed_twice_is_read_once(
    copy: Path, monkeypatch: pytest.MonkeyPatch, read: list[Path]
):
    # Where nothing can be marked as verified: each would read it again.
    monkeypatch.setattr("data_pipeline.verification.is_writable", lambda folder: False)
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    shutil.rmtree(copy / ".verified", ignore_errors=True)
    corpora = Corpora(Data(train=[copy, copy], stages=[{"from_step": 5, "train": copy}]))
    assert sorted(file.name for file in read) == [
        "train.bin",
        "train.idx",
        "validation.bin",
        "validation.idx",
    ]
    assert [len(stage) for stage in corpora.stages] == [2, 1]


def test_a_read_only_corpus_is_verified_once_in_the_run_or_the_user_s_cache(
    copy: Path, check_cache: Path, tmp_path: Path, read: list[Path]
):
    shutil.rmtree(copy / ".verified", ignore_errors=True)
    copy.chmod(0o555)
    for markers in ([tmp_path / "run/verified"], []):
        read.clear()
        Corpora(Data(train=copy), markers=markers)
        Corpora(Data(train=copy), markers=markers)
        assert len(read) == 4
    shutil.rmtree(check_cache)
    check_cache.write_text("no folder")
    read.clear()
    Corpora(Data(train=copy))
    Corpora(Data(train=copy))
    assert len(read) == 8, "without any place, both splits are read at every start"
    assert not (copy / ".verified").exists()
    copy.chmod(0o755)


def test_verification_reads_as_much_as_data_verify_says(copy: Path, check_cache: Path, read: list[Path]):
    flip(copy / "train.bin", 0.5)
    for verify in ("sizes", "none"):
        Corpora(Data(train=copy, verify=verify))
    assert read == []
    assert "holds a damaged train.bin" in open_error(Data(train=copy))
    with (copy / "train.bin").open("ab") as stream:
        stream.write(b"xx")
    assert "holds a truncated or foreign train.bin" in open_error(Data(train=copy, verify="sizes"))
    Corpora(Data(train=copy, verify="none"))


def test_a_failed_verification_is_not_cached(copy: Path, check_cache: Path):
    flip(copy / "train.bin", 0.5)
    for _ in range(2):
        assert "holds a damaged train.bin" in open_error(Data(train=copy))


def rewrite(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    (folder / "manifest.json").write_text(json.dumps(manifest))


def replace(folder: Path, kind: str, content: np.ndarray) -> None:
    """Replace a file of the training split, and update the manifest to match."""
    content.tofile(folder / f"train.{kind}")
    splits = json.loads((folder / "manifest.json").read_text())["splits"]
    splits["train"][kind] = FileRecord.of(folder / f"train.{kind}").model_dump()
    rewrite(folder, splits=splits)


@pytest.mark.parametrize("of", ["lengths", "starts"])
def test_an_index_that_does_not_fit_the_token_file_is_refused(copy: Path, of: str):
    """Document lengths or starts that lie beyond the token file."""
    index = np.fromfile(copy / "train.idx", np.uint8)
    documents = Corpora(Data(train=copy)).train[0].record("train").documents
    place = {"lengths": 34, "starts": 34 + 4 * documents}[of]
    index[place : place + 4] = 0x7F
    replace(copy, "idx", index)
    error = open_error(Data(train=copy))
    assert "holds a train.idx whose documents are not those of train.bin; copy the folder" in error


def test_ids_beyond_the_tokenizer_are_refused(copy: Path):
    tokens = np.fromfile(copy / "train.bin", np.uint16)
    tokens[len(tokens) // 2] = 300
    replace(copy, "bin", tokens)
    assert "holds the id 300 in train.bin, but its tokenizer has 257 ids" in open_error(Data(train=copy))


def test_a_manifest_of_another_vocabulary_is_refused(copy: Path):
    tokenizer = json.loads((copy / "manifest.json").read_text())["tokenizer"]
    rewrite(copy, tokenizer={**tokenizer, "vocab_size": 301})
    assert "has a tokenizer of 257 ids, but its manifest says 301" in open_error(Data(train=copy))


@pytest.mark.parametrize("changes", [{"eod": 257}, {"eod": -1}, {"bos": 300}])
def test_a_manifest_whose_special_tokens_are_no_ids_is_refused(copy: Path, changes):
    (name,) = changes
    tokenizer = json.loads((copy / "manifest.json").read_text())["tokenizer"] | changes
    rewrite(copy, tokenizer=tokenizer)
    assert (
        f"is damaged (tokenizer: Value error, {name}={changes[name]} is none of the 257 ids)"
        in open_error(Data(train=copy))
    )


def test_a_manifest_of_another_format_is_refused(copy: Path):
    rewrite(copy, format=7, novelty={})
    assert "manifest.json is of format 7, which this version cannot read (1); prepare" in open_error(
        Data(train=copy)
    )


def test_a_corpus_without_its_tokenizer_is_refused(copy: Path):
    shutil.rmtree(copy / "tokenizer")
    assert open_error(Data(train=copy)).startswith(f"data.train={copy} lacks tokenizer/; copy the folder")

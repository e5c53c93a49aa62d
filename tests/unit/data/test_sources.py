import ast
import asyncio
import errno
import gzip
import inspect
import json
import os
import sys
import textwrap
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data_pipeline import sources
from data_pipeline.accounting import describe_bad_rows
from data_pipeline.document import Columns
from data_pipeline.prepare import open_source
from tests.unit.data.conftest import documents, prepared, write_jsonl

TEXTS = documents(7, seed=5)


def read(
    *spec: str, text_key: str = "text", split: str = "train", include: tuple[str, ...] = ()
) -> list[str]:
    source = open_source(list(spec), columns=Columns((text_key,)), split=split, include=list(include))
    return [text for document in source for text in document.texts]


def test_each_line_of_jsonl_is_a_document(tmp_path: Path):
    assert read(str(write_jsonl(tmp_path / "a.jsonl", TEXTS))) == TEXTS


def test_compressed_jsonl_is_read(tmp_path: Path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as stream:
        stream.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS)
    assert read(str(tmp_path / "a.jsonl.gz")) == TEXTS


def test_each_parquet_row_is_a_document_from_the_chosen_column(tmp_path: Path):
    table = pyarrow.table({"body": TEXTS, "text": ["no"] * len(TEXTS)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(str(tmp_path / "a.parquet"), text_key="body") == TEXTS


def test_files_are_read_in_the_given_order(tmp_path: Path):
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    assert read(str(tmp_path / "b.txt"), str(tmp_path / "a.txt")) == ["b", "a"]


def test_files_of_a_directory_are_read_in_sorted_order(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "z.py").write_text("z = 1\r\n", newline="")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / ".hidden").write_text("no")
    assert read(str(tmp_path)) == ["b", "z = 1\r\n"]
    assert read(str(tmp_path), include=("*.py", "*.md")) == ["z = 1\r\n"]


def test_linked_directories_are_read_once(tmp_path: Path):
    for name in ("source/sub", "elsewhere/.hidden"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "own.txt").write_text(name)
    (tmp_path / "elsewhere" / "a.txt").write_text("linked")
    links = {"a": "elsewhere", "b": "elsewhere", "again": "source/sub", "circle": "source", "all": "."}
    for name, target in links.items():
        (tmp_path / "source" / name).symlink_to(tmp_path / target)
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "elsewhere")
    assert read(str(tmp_path / "source")) == ["linked", "source/sub"]


def test_what_prepare_and_the_file_system_made_is_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "lost+found").mkdir()
    for name in ("a.txt", "lost+found/#17"):
        (tmp_path / name).write_text("a text")
    prepared(tmp_path / "sub" / "prepared", [str(tmp_path)], validation_fraction=0.0)
    assert read(str(tmp_path)) == ["a text"]
    assert f"{tmp_path / 'sub' / 'prepared'} is a prepared folder and is not read" in caplog.text
    with pytest.raises(
        ValueError, match=r"--source .*/prepared is a prepared folder and no text; list it in data"
    ):
        read(str(tmp_path / "sub" / "prepared"))


def test_a_directory_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "private").mkdir()
    (tmp_path / "a.txt").write_text("a")
    scandir, stat = os.scandir, os.stat

    def list_unless_private(path: str):  # permissions do not hold root back
        if str(path).endswith("private"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    def stat_unless_in_private(path: str, **options: object):
        if "private/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "scandir", list_unless_private)
    monkeypatch.setattr(os, "stat", stat_unless_in_private)
    with pytest.raises(ValueError, match=r"--source .*private cannot be read: Permission denied; make it"):
        read(str(tmp_path))


def test_a_table_may_have_an_ending_in_capitals(tmp_path: Path):
    rows = write_jsonl(tmp_path / "A.JSONL", TEXTS)
    (tmp_path / "B.JSONL.GZ").write_bytes(gzip.compress(rows.read_bytes()))
    assert read(str(rows)) == read(str(tmp_path / "B.JSONL.GZ")) == TEXTS


def test_documents_without_text_are_skipped_and_counted(tmp_path: Path):
    (tmp_path / "fine.txt").write_text("fine")
    (tmp_path / "rows.jsonl").write_text('{"text": "row"}\n{"text": null}\n{"text": ""}\n')
    source = open_source([str(tmp_path / "fine.txt"), str(tmp_path / "rows.jsonl")])
    assert [document.texts for document in source] == [("fine",), ("row",)]
    assert source.skipped == {"empty": 2}
    assert [document.texts for document in source] == [("fine",), ("row",)], "a source can be read again"
    assert source.skipped.total() == 2


def test_a_very_long_file_is_split_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = "".join(f"line {i}\n" for i in range(100))
    (tmp_path / "long.txt").write_text(text)
    monkeypatch.setattr(sources, "LONGEST_DOCUMENT", 200)
    parts = read(str(tmp_path / "long.txt"))
    assert "".join(parts) == text
    assert len(parts) > 3
    assert all(part.endswith("\n") and len(part) < 220 for part in parts)


def test_stdlib_gives_the_library_sources_without_tests():
    source = open_source(["stdlib"])
    description = source.description
    assert description["kind"] == "stdlib"
    assert description["python"] == ".".join(map(str, sys.version_info[:3]))
    texts = [text for document in source for text in document.texts]
    assert 5e6 < sum(map(len, texts)) < 30e6
    assert any("class Thread:" in text for text in texts)
    assert not any("class TestThread" in text for text in texts)


def test_stdlib_with_labels_gives_functions_labelled_by_package():
    columns = Columns(label="package")
    source = open_source(["stdlib"], columns=columns)
    functions = list(source)
    packages = {function.texts[0]: function.label for function in functions}
    assert len(packages) == len(functions) > 2000, "no text occurs twice"
    assert set(packages.values()) == set(sources.LIBRARY_PACKAGES) == set(source.description["functions of"])
    assert all(ast.parse(text).body[0].name for text in packages), "each text is a single function"
    method = textwrap.dedent(inspect.getsource(asyncio.Lock.release)).rstrip("\n")
    assert packages[method] == "asyncio"


def test_stdlib_refuses_other_label_columns():
    columns = Columns(label="module")
    with pytest.raises(ValueError, match=r"no column 'module' among text, package; set --labels"):
        list(open_source(["stdlib"], columns=columns))


def test_a_dataset_is_streamed_by_name_and_split(tmp_path: Path):
    # With a local folder as its name, `load_dataset` needs no network.
    write_jsonl(tmp_path / "train.jsonl", TEXTS[:3])
    write_jsonl(tmp_path / "test.jsonl", TEXTS[3:])
    assert read(f"hf:{tmp_path}", split="test") == TEXTS[3:]


def test_missing_sources_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"--source .*nothing does not exist; give files"):
        read(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"holds no file; give another"):
        read(str(tmp_path))
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"holds no file that matches --include \*\.py; give another"):
        read(str(tmp_path), include=("*.py",))


def test_a_missing_text_column_is_refused_with_the_existing_columns(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS, key="content")
    with pytest.raises(
        ValueError, match=r"a\.jsonl cannot be read: no column 'text' among content, id; set --text-key"
    ):
        read(str(path))
    with pytest.raises(ValueError, match=r"column 'id' holds int, not text; set --text-key"):
        read(str(path), text_key="id")


@pytest.mark.parametrize("name", ["broken.jsonl", "broken.parquet"])
def test_a_damaged_table_is_refused_in_one_line(tmp_path: Path, name: str):
    (tmp_path / name).write_text('{"text": "a" \n{"text": ')
    with pytest.raises(ValueError, match=rf"^--source .*{name} cannot be read: .+") as error:
        read(str(tmp_path / name))
    assert "\n" not in str(error.value)


def test_damaged_rows_and_empty_files_are_skipped(tmp_path: Path):
    (tmp_path / "0.jsonl").write_text("")
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "2.jsonl").write_bytes(
        b'{"text": "\xff\xfe"}\n\n{"text": "\\ud83d"}\n'
        b'{"text": "a", "meta": 1}\n{"text": null, "meta": "b"}\n{"text": "\\ud83d\\ude00"}'
    )
    source = open_source([str(tmp_path)])
    assert [document.texts for document in source] == [("a",), ("😀",)]
    assert source.skipped == {"not UTF-8": 2, "empty": 1}


def test_a_row_without_the_text_column_is_a_bad_one(tmp_path: Path):
    """Unlike one whose text is null or empty: most rows of a file may have another key."""
    rows = ['{"text": "a"}'] * 3 + ['{"content": "b", "id": 1}'] + ['{"text": null}', '{"text": ""}']
    (tmp_path / "mixed.jsonl").write_text("\n".join(rows))
    source = open_source([str(tmp_path)])
    assert [document.texts for document in source] == [("a",)] * 3
    assert source.skipped == {"bad row": 1, "empty": 2}
    line = f"{tmp_path / 'mixed.jsonl'}: row 4 (no column 'text' among content, id)"
    assert describe_bad_rows(source.counts) == [line]
    (tmp_path / "mixed.jsonl").write_text("\n".join(rows[:3] + rows[3:4] * 1000))
    reason = "no column 'text' among content, id; set --text-key; 1,000 of 1,003 rows are bad, more than --max-bad-"
    with pytest.raises(ValueError, match=f"mixed.jsonl cannot be read: row 4: {reason}"):
        list(open_source([str(tmp_path)]))


def test_a_null_structure_has_empty_texts(tmp_path: Path):
    nested = '{"content": {"text": "a"}}\n{"content": null}\n{"content": {"id": 1}}\n{"content": "b"}'
    (tmp_path / "nested.jsonl").write_text(nested)
    source = open_source([str(tmp_path)], columns=Columns(("content.text",)))
    source.max_bad_rows = 1
    assert [document.texts for document in source] == [("a",)]
    assert source.skipped == {"empty": 1, "bad row": 2}


def test_texts_that_look_like_other_types_stay_text(tmp_path: Path):
    texts = ["2020-01-02", "2020-01-02 00:00:00", "12", "null", "[1]", "{}"]
    assert read(str(write_jsonl(tmp_path / "a.jsonl", texts))) == texts


def test_zstandard_is_read_without_another_package(tmp_path: Path):
    with pyarrow.output_stream(tmp_path / "a.jsonl.zst") as stream:
        stream.write(b'{"text": "a"}\n')
    assert read(str(tmp_path)) == ["a"]


def test_a_file_that_vanishes_is_named(tmp_path: Path):
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text("a")
    documents = iter(open_source([str(tmp_path)]))
    next(documents)
    (tmp_path / "b.txt").unlink()
    with pytest.raises(ValueError, match=r"--source .*b\.txt cannot be read: .*No such file"):
        next(documents)


def test_an_unreachable_dataset_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"^--source hf:nobody/nothing cannot be read: .+") as error:
        read("hf:nobody/nothing")
    assert "\n" not in str(error.value)

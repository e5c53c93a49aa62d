"""What files hold is told by their content, and no file is left out without a word."""

import bz2
import csv
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from data_pipeline.document import Columns
from data_pipeline.manifest import Manifest
from data_pipeline.prepare import PrepareRequest, open_source, prepare
from tests.tiers import tiered
from tests.unit.data.conftest import documents

TEXTS = [*documents(7, seed=5), 'a "quoted", text\nof two lines', "x" * 200_000]
ROWS = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def pyarrow_compress(codec: str) -> Callable[[bytes], bytes]:
    def compress(content: bytes) -> bytes:
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, codec) as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()

    return compress


COMPRESSIONS = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".zst": pyarrow_compress("zstd"),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".lz4": pyarrow_compress("lz4"),
}


def csv_text(delimiter: str = ",") -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, ["id", "text"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return stream.getvalue()


TABLES = {
    **dict.fromkeys((".jsonl", ".json", ".jl", ".jsonlines", ".ndjson", ".txt", ""), LINES),
    "-array.json": json.dumps(ROWS),
    "-indented.json": json.dumps(ROWS, indent=2),
    "-array-a-line.json": "[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n",
    "-one-after-another.json": "\n".join(json.dumps(row, indent=2) for row in ROWS),
    "-indented.jsonl": "\n".join(json.dumps(row, indent=2) for row in ROWS),
    "-array.txt": json.dumps(ROWS),
    ".csv": csv_text(),
    "-semicolons.csv": csv_text(";"),
}


def texts_of(*spec: Path, key: str = "text", include: tuple[str, ...] = ()) -> list[str]:
    source = open_source(list(map(str, spec)), columns=Columns((key,)), include=include)
    return [text for document in source for text in document.texts]


def prepared_output(source: Path, out: Path, **request: Any) -> str:
    """What `prepare` says of a source, on lines that are not wrapped."""
    console = Console(file=io.StringIO(), width=1000)
    options = {"tokenizer": "byte", "validation_fraction": 0.0, **request}
    prepare(PrepareRequest(source=[str(source)], **options), out, workers=1, overwrite=False, console=console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_a_document_per_row_under_every_usual_name(tmp_path: Path, name: str, compression: str):
    file = tmp_path / f"c4-train.00000-of-00001{name}{compression}"
    file.write_bytes(COMPRESSIONS[compression](TABLES[name].encode()))
    assert texts_of(file) == texts_of(tmp_path) == TEXTS
    capitals = file.rename(tmp_path / file.name.upper())
    assert texts_of(capitals) == TEXTS


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", [".jsonl", ".json", "-array.json", ".csv", "-semicolons.csv"])
def test_a_table_in_another_encoding_of_unicode_is_read(tmp_path: Path, name: str, encoding: str):
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / f"a{name}").write_bytes((mark + TABLES[name]).encode(encoding))
    assert texts_of(tmp_path / f"a{name}") == TEXTS


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_text_in_another_encoding_of_unicode_is_read(tmp_path: Path, encoding: str):
    (tmp_path / "a.txt").write_bytes("déjà vu\r\n".encode(encoding))
    assert texts_of(tmp_path / "a.txt") == ["déjà vu\r\n"]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_compressed_text_is_read(tmp_path: Path, compression: str):
    (tmp_path / f"a.txt{compression}").write_bytes(COMPRESSIONS[compression]("déjà vu\r\n".encode()))
    assert texts_of(tmp_path / f"a.txt{compression}") == ["déjà vu\r\n"]


def test_content_counts_more_than_the_name(tmp_path: Path):
    (tmp_path / "compressed.jsonl").write_bytes(gzip.compress(LINES.encode()))
    (tmp_path / "plain.jsonl.gz").write_text(LINES)
    (tmp_path / "zstd.json.gz").write_bytes(COMPRESSIONS[".zst"](LINES.encode()))
    for name in ("compressed.jsonl", "plain.jsonl.gz", "zstd.json.gz"):
        assert texts_of(tmp_path / name) == TEXTS
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "table.bin")
    assert texts_of(tmp_path / "table.bin") == TEXTS


def test_concatenated_compressed_parts_are_read_to_the_end(tmp_path: Path):
    for compression in (".gz", ".zst", ".xz", ".bz2"):
        half = COMPRESSIONS[compression](LINES.encode())
        (tmp_path / f"a.jsonl{compression}").write_bytes(half + half)
        assert texts_of(tmp_path / f"a.jsonl{compression}") == 2 * TEXTS


def test_a_tab_separated_table_has_a_document_per_row(tmp_path: Path):
    (tmp_path / "a.tsv").write_text('id\ttext\n1\ta "b\n\n2\tc, d\n')
    assert texts_of(tmp_path / "a.tsv") == ['a "b', "c, d"]
    with pytest.raises(
        ValueError, match=r"a\.tsv cannot be read: no column 'body' among id, text; set --text-key"
    ):
        texts_of(tmp_path / "a.tsv", key="body")


@pytest.mark.parametrize("write", [pyarrow.feather.write_feather, "stream"])
def test_an_arrow_file_has_a_document_per_row(tmp_path: Path, write: Any):
    table = pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    file = tmp_path / "a.arrow"
    if write == "stream":
        with pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    else:
        write(table, str(file))
    assert texts_of(file) == TEXTS


def test_a_dataset_saved_to_disk_is_read(tmp_path: Path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    assert texts_of(tmp_path / "saved") == TEXTS
    (tmp_path / "saved" / "cache-1234.arrow").write_bytes(b"what `map` leaves there")
    assert texts_of(tmp_path / "saved") == TEXTS
    assert "1 file left out: a cache of `datasets`" in prepared_output(tmp_path / "saved", tmp_path / "out")


@pytest.mark.parametrize("key", ["content.text", "a.b.c"])
def test_a_dotted_path_names_a_nested_column(tmp_path: Path, key: str):
    rows: list[Any] = list(TEXTS)
    for part in reversed(key.split(".")):
        rows = [{part: row, "id": 1} for row in rows]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "array.json").write_text(json.dumps(rows))
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    pyarrow.feather.write_feather(table, str(tmp_path / "a.arrow"))
    for name in ("a.jsonl", "array.json", "a.parquet", "a.arrow"):
        assert texts_of(tmp_path / name, key=key) == TEXTS
        with pytest.raises(ValueError, match=rf"no column 'text' among {key}, .*id; set --text-key"):
            texts_of(tmp_path / name)
    assert texts_of_hub(tmp_path, rows, key) == TEXTS


def texts_of_hub(folder: Path, rows: list[Any], key: str) -> list[str]:
    (folder / "hub").mkdir()
    (folder / "hub" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source([f"hf:{folder / 'hub'}"], columns=Columns((key,)))
    return [text for document in source for text in document.texts]


def test_a_column_whose_name_has_a_dot_is_read_as_it_is(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"content.text": "right", "content": {"text": "wrong"}}\n')
    assert texts_of(tmp_path / "a.jsonl", key="content.text") == ["right"]


def zip_file(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.jsonl", LINES)


def tar_file(file: Path) -> None:
    with tarfile.open(file, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.jsonl"), io.BytesIO())


BINARIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a.zip": (zip_file, "a zip archive; unpack it"),
    "table.jsonl": (zip_file, "a zip archive; unpack it"),
    "a.tar.gz": (tar_file, r"a tar archive; unpack it \(gzip\)"),
    "a.npy": (lambda file: np.save(file, np.arange(9)), "a NumPy array"),
    "a.npz": (lambda file: np.savez(file, a=np.arange(9)), "NumPy arrays"),
    "a.pkl": (lambda file: file.write_bytes(pickle.dumps(ROWS)), "a pickle"),
    "text.pickle": (lambda file: file.write_bytes(pickle.dumps(ROWS, protocol=0)), "a pickle"),
    "a.pt": (lambda file: torch.save({"a": torch.ones(3)}, file), "a PyTorch file"),
    "model.safetensors": (lambda file: save_file({"a": torch.ones(3)}, file), r"weights \(safetensors\)"),
    "twice.json.gz": (
        lambda file: file.write_bytes(gzip.compress(gzip.compress(LINES.encode()))),
        "compressed twice; decompress it once",
    ),
    "zeros.txt": (lambda file: file.write_bytes(b"text" + bytes(9)), r"binary \(it has NUL bytes\)"),
    "latin.txt": (lambda file: file.write_bytes("déjà vu".encode("latin-1")), "not UTF-8"),
    "cut.txt.xz": (lambda file: file.write_bytes(lzma.compress(LINES.encode())[:40]), "damaged xz"),
    "a.pdf": (lambda file: file.write_bytes(b"%PDF-1.7 text"), "a PDF; convert it to text"),
}


@pytest.mark.parametrize("name", tiered(BINARIES, [*BINARIES][:4]))
def test_what_is_no_text_is_refused_by_its_name_and_listed_in_a_folder(tmp_path: Path, name: str):
    write, what = BINARIES[name]
    file = tmp_path / "folder" / name
    file.parent.mkdir()
    write(file)
    with pytest.raises(ValueError, match=rf"--source .*{name} is not read: it is {what}; give files of text"):
        texts_of(file)
    with pytest.raises(ValueError, match=rf"{name} and 0 other files are not read: it is {what}; no text is"):
        texts_of(file.parent)
    (file.parent / "README.md").write_text("About the files.")
    with pytest.raises(ValueError, match=rf"{name} and 0 other files are not read: it is {what}; no text is"):
        texts_of(file.parent)
    (file.parent / "chapter.txt").write_text("A text.")
    output = prepared_output(file.parent, tmp_path / "out")
    assert f"1 file left out: {what}: {name}".replace("\\", "") in output
    assert "2 files read as text: README.md, chapter.txt" in output


def test_tokens_of_megatron_are_named_as_such(tmp_path: Path, corpus: Path):
    for ending in ("bin", "idx"):
        (tmp_path / f"web_text_document.{ending}").write_bytes((corpus / f"train.{ending}").read_bytes())
    for source in (tmp_path, tmp_path / "web_text_document.bin"):
        with pytest.raises(
            ValueError,
            match=r"is Megatron's tokens and no text; train on them with data.train=.*text_document",
        ):
            texts_of(source)
    with pytest.raises(ValueError, match=r"is the index of Megatron's token files; give their prefix to"):
        texts_of(tmp_path / "web_text_document.idx")


def test_a_pointer_of_git_lfs_is_never_taken_for_a_table(tmp_path: Path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / "0.parquet").write_text(pointer)
    (tmp_path / "1.jsonl").write_text(LINES)
    with pytest.raises(
        ValueError, match=r"0\.parquet cannot be read: it is a pointer of Git LFS .* `git lfs pull`"
    ):
        texts_of(tmp_path)


def test_a_cloned_dataset_is_read_as_its_tables_and_the_rest_is_listed(tmp_path: Path):
    clone, data = tmp_path / "clone", tmp_path / "clone" / "data"
    data.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), data / "train-00000-of-00001.parquet")
    (data / "train-00000-of-00001.parquet.crc").write_bytes(b"crc\x00\x01")
    (clone / "README.md").write_text("---\nlicense: mit\n---\n# A card\n" * 500)
    (clone / "LICENSE").write_text("A license.")
    (clone / "dataset_infos.json").write_text('{"default": {"features": {"text": {"dtype": "string"}}}}')
    (clone / "stats.json").write_text('{\n  "rows": 9\n}\n')
    (clone / "labels.csv").write_text("id,label\n1,a\n")
    (clone / "_SUCCESS").write_text("")
    assert texts_of(clone) == TEXTS
    output = prepared_output(clone, tmp_path / "out")
    assert "1 file read as rows (Parquet): data/train-00000-of-00001.parquet" in output
    for why, name in {
        "text beside tables": "LICENSE, README.md",
        "JSON lines without column text, beside tables": "dataset_infos.json",
        "JSON without column text, beside tables": "stats.json",
        "CSV without column text, beside tables": "labels.csv",
        "empty": "_SUCCESS",
        "binary (it has NUL bytes)": "data/train-00000-of-00001.parquet.crc",
    }.items():
        assert f"left out: {why}: {name}" in output
    assert len(texts_of(clone, include=("*.parquet", "*.md"))) == len(TEXTS) + 1, "patterns say what is read"


def test_hidden_files_and_folders_are_left_out_with_one_line(tmp_path: Path):
    source = tmp_path / "source"
    (source / "sub/.git/inner").mkdir(parents=True)
    (source / "a.txt").write_text(" ".join(TEXTS[:3]))
    for hidden in (".f.txt", "sub/.hid", "sub/.git/inner/b.txt"):
        (source / hidden).write_text("hidden text")
    output = prepared_output(source, tmp_path / "out")
    assert "1 file read as text: a.txt" in output
    assert "3 left out: hidden: .f.txt, sub/.git, sub/.hid" in output
    assert Manifest.read(tmp_path / "out").source["left_out"] == {"hidden": 3}
    assert texts_of(source / ".f.txt") == ["hidden text"], "named, it is read"
    (source / "a.txt").unlink()
    with pytest.raises(ValueError, match="holds no file; give another directory or pattern"):
        texts_of(source)


def test_json_without_the_text_column_is_text_beside_texts_and_the_table_says_so(tmp_path: Path):
    code = tmp_path / "code"
    code.mkdir()
    (code / "main.py").write_text("print('Hello.')\n")
    (code / "second.py").write_text("print('Bye.')\n")
    (code / "package.json").write_text('{\n  "name": "code",\n  "version": "1.0"\n}\n')
    (code / "minified.json").write_text('{"name": "code"}')
    (code / "fixtures.json").write_text('[{"name": "a"}, {"name": "b"}]')
    (code / "rows.csv").write_text("a,b\n1,2\n")
    (code / "locale.json").write_text('{"text": "Hello"}')
    assert sorted(texts_of(code)) == sorted(file.read_text() for file in code.iterdir())
    output = prepared_output(code, tmp_path / "out")
    assert "2 files read as text: main.py, second.py" in output
    for what, name in {
        "JSON without column text": "fixtures.json, package.json",
        "JSON lines without column text": "minified.json",
        "CSV without column text": "rows.csv",
        "JSON lines, one object": "locale.json",
    }.items():
        assert f"read as text ({what}): {name}" in output


@pytest.mark.parametrize("indent", [None, 2])
def test_json_files_of_one_object_are_rows_and_a_wrong_text_key_is_refused(
    tmp_path: Path, indent: int | None
):
    for index, row in enumerate(ROWS):
        (tmp_path / f"{index}.json").write_text(json.dumps(row, indent=indent))
    (tmp_path / "README.md").write_text("About the files.")
    assert texts_of(tmp_path) == texts_of(*(tmp_path / f"{i}.json" for i in range(len(ROWS)))) == TEXTS
    with pytest.raises(
        ValueError, match=r"0\.json cannot be read: no column 'body' among id, text; set --text-key"
    ):
        texts_of(tmp_path, key="body")


def test_a_table_with_another_text_column_is_refused_although_a_readme_is_beside_it(tmp_path: Path):
    (tmp_path / "README.md").write_text("About the table.")
    for name, content in {"train.json": LINES, "a.json": json.dumps(ROWS), "a.csv": csv_text()}.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(
            ValueError, match=rf"{name} cannot be read: no column 'body' among id, text; set --text"
        ):
            texts_of(tmp_path, key="body")
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    "text",
    ["[section]\nkey = 1\n", "{\\rtf1 text}", "{x} and {y}\n", "[1, 2, 3]\n", "{% if a %}\n", "{\n}\n"],
)
def test_a_text_that_begins_as_json_does_is_a_text(tmp_path: Path, text: str):
    (tmp_path / "a.txt").write_text(text)
    assert texts_of(tmp_path / "a.txt") == [text]


def test_labels_are_read_from_csv_with_its_quotes(tmp_path: Path):
    (tmp_path / "a.csv").write_text('kind,text\n1,"a, b"\n0,"two\nlines"\n')
    source = open_source([str(tmp_path / "a.csv")], columns=Columns(label="kind"))
    assert [(document.texts[0], document.label) for document in source] == [("a, b", 1), ("two\nlines", 0)]

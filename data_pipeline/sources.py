"""Sources of documents: files, directory trees, the Python standard library, or a dataset of the hub.

Documents are streamed: no source holds more than a batch of rows or one part of a file. `datasets` reads the hub alone:
local tables take a fifth of its time without it, one damaged row or empty file of many is no reason to stop, and what a
text looks like (a date, a list) does not change it.
"""

import ast
import io
import json
import sysconfig
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from data_pipeline.chat import ASSISTANT, conversation
from data_pipeline.document import TEXT, Columns, Document, Label
from data_pipeline.tokenizers import Tokenizer, unreachable
from megakernel.config.errors import UserError, first_line

TABLES = {
    ".jsonl": "json",
    ".jsonl.gz": "json",
    ".jsonl.zst": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
}
"""File endings whose rows are documents, and their form; any other file is one document."""

TABS = ".tsv"
"""Ending of a tab-separated table; without --labels such a file is a text."""

LONGEST_DOCUMENT = 64 * 2**20
"""Characters; a longer text file becomes several documents, cut at line ends."""

_BATCH = 256
"""Rows of a table that are looked at together."""

HUB = "hf"
BENCHMARKS = ("lra", "glue", "sparsity")
"""Prefixes, before a colon, of sources that are no paths."""


class Source(ABC):
    """Documents in a fixed order."""

    endless = False
    """Whether there is always another one."""

    has_splits = False
    """Whether documents name the split that they belong to."""

    classes: tuple[Label, ...] = ()
    """Classes that labels come from, where they are known before reading; others are those that occur."""

    def __init__(self, description: dict[str, Any], total: int | None = None):
        """description: the manifest's entry. total: number of documents, where it is known before reading."""
        self.description = description
        self.total = total
        self.skipped: Counter[str] = Counter()
        """Documents of the latest reading that were passed over, by reason."""
        self._tokenizer: Tokenizer | None = None

    def __iter__(self) -> Iterator[Document]:
        """The documents that have text; the others are counted in `skipped`."""
        self.skipped.clear()
        for document in self._read():
            if not all(document.texts):
                self.skipped["empty"] += 1
            elif document.messages is not None and not _is_answered(document.messages):
                self.skipped["no message of the assistant"] += 1
            else:
                yield document

    def encoded_by(self, tokenizer: Tokenizer) -> None:
        """Be told what the documents that are read from now on are encoded by."""
        self._tokenizer = tokenizer

    @abstractmethod
    def _read(self) -> Iterator[Document]:
        """All documents, those with an empty text among them."""


class Files(Source):
    """Files in the given order; tables (`TABLES`) give a document a row, other files are a document each."""

    def __init__(self, files: list[Path], columns: Columns, description: dict[str, Any]):
        """Open nothing yet; the files exist."""
        has_rows = columns.label is not None or any(map(table_kind, files))
        super().__init__({**description, "files": len(files)}, None if has_rows else len(files))
        self._files = files
        self._columns = columns

    def _read(self) -> Iterator[Document]:
        for file in self._files:
            try:
                yield from self._of(file)
            # The file system, pyarrow and JSON share no exception type for "this cannot be read".
            except Exception as error:
                raise _unreadable(str(file), error) from error

    def _of(self, file: Path) -> Iterator[Document]:
        if kind := table_kind(file):
            return self._json(file) if kind == "json" else self._parquet(file)
        if self._columns.label is not None:
            return self._tabs(file, self._columns.label)
        return self._text(file)

    def _json(self, file: Path) -> Iterator[Document]:
        rows = self._json_rows(file)
        # A row may lack a column that others have; a file whose first rows all lack it has another one.
        first = list(islice(rows, _BATCH))
        if first:
            _check_columns(dict.fromkeys(chain(*first)), self._columns)
        for row in chain(first, rows):
            document = _document(tuple(map(row.get, self._columns.names)), self._columns)
            if all(map(_is_unicode, document.texts)):
                yield document
            else:
                self.skipped["not UTF-8"] += 1

    def _json_rows(self, file: Path) -> Iterator[dict[str, Any]]:
        import pyarrow

        # Decompressed as the file's ending says.
        with pyarrow.input_stream(str(file)) as stream, io.BufferedReader(stream, 2**20) as lines:
            for number, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                try:
                    row = json.loads(line)
                except UnicodeDecodeError:
                    self.skipped["not UTF-8"] += 1
                    continue
                except json.JSONDecodeError as error:
                    raise UserError(f"line {number}: {error.msg} at character {error.pos + 1}") from None
                if not isinstance(row, dict):
                    raise UserError(f"line {number} holds a {type(row).__name__}, not one row in braces")
                yield row

    def _parquet(self, file: Path) -> Iterator[Document]:
        from pyarrow.parquet import ParquetFile

        with ParquetFile(file) as table:
            _check_columns(table.schema_arrow.names, self._columns)
            for batch in table.iter_batches(_BATCH, columns=list(self._columns.names)):
                yield from _documents(batch.to_pydict(), self._columns)

    def _tabs(self, file: Path, label: str) -> Iterator[Document]:
        names, columns = tsv_names(file), self._columns
        if columns.texts == TEXT.texts and len(names) == 2 and label in names:
            columns = Columns(tuple(name for name in names if name != label), label)
        _check_columns(names, columns)
        for row in tsv_rows(file, names):
            if row is None or not row[label]:
                self.skipped["no labelled row"] += 1
            else:
                yield Document(tuple(row[name] for name in columns.texts), class_of(row[label]))

    def _text(self, file: Path) -> Iterator[Document]:
        with file.open(encoding="utf-8", newline="") as stream:
            try:
                yield Document((_part(stream),))
                while part := _part(stream):
                    yield Document((part,))
            except UnicodeDecodeError:
                self.skipped["not UTF-8"] += 1


class Hub(Source):
    """A dataset `datasets.load_dataset` knows by name, streamed."""

    def __init__(self, spec: str, split: str, columns: Columns):
        """Open nothing yet; spec: hf:NAME[:CONFIG]."""
        self._where = _hub(spec, split)
        super().__init__({"kind": "hub", **self._where})
        self._columns = columns

    def _read(self) -> Iterator[Document]:
        return _hub_documents(self._where, self._columns, f"{HUB}:{self._where['path']}")


class LibraryFunctions(Source):
    """Functions of the standard library with the package they are from, for a classifier."""

    def __init__(self, columns: Columns, description: dict[str, Any]):
        """Read nothing yet."""
        super().__init__({**description, "functions of": list(LIBRARY_PACKAGES)})
        self._columns = columns

    def _read(self) -> Iterator[Document]:
        return _documents(library_functions(), self._columns)


def hub_documents(spec: str, split: str, columns: Columns) -> Iterator[Document]:
    """The rows of a split of hf:NAME[:CONFIG] as documents."""
    return _hub_documents(_hub(spec, split), columns, spec)


def hub_rows(spec: str, split: str, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a split of hf:NAME[:CONFIG], with these columns as `datasets` decodes them."""
    try:
        for row in _streamed(_hub(spec, split)):
            yield {key: row[key] for key in keys}
    except Exception as error:
        raise _unreadable(spec, error) from error


def _hub(spec: str, split: str) -> dict[str, Any]:
    name, _, config = spec.removeprefix("hf:").partition(":")
    return {"path": name, "name": config or None, "split": split}


def tsv_names(file: Path) -> tuple[str, ...]:
    """The columns that the first line of a file names, between tabs."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        return tuple(next(lines, "").rstrip("\r\n").split("\t"))


def tsv_rows(file: Path, names: Sequence[str], headed: bool = True) -> Iterator[dict[str, str] | None]:
    """Each row, unquoted, by the names of its columns; None for one that is not UTF-8 or has other fields.

    headed: the first line is no row.
    """
    with file.open("rb") as lines:
        for line in islice(lines, int(headed), None):
            try:
                fields = line.decode().rstrip("\r\n").split("\t")
            except UnicodeDecodeError:
                fields = []
            yield dict(zip(names, fields)) if len(fields) == len(names) else None


def class_of(text: str) -> Label:
    """A class as a text names it: digits are a number."""
    return int(text) if text.isdecimal() else text


def table_kind(file: Path) -> str | None:
    """The form of a table, None for a plain text file."""
    return next((kind for ending, kind in TABLES.items() if file.name.endswith(ending)), None)


def _is_unicode(text: str) -> bool:
    """Whether a text can be written; JSON can hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _part(stream: TextIO) -> str:
    return stream.read(LONGEST_DOCUMENT) + stream.readline(LONGEST_DOCUMENT)


def _hub_documents(where: dict[str, Any], columns: Columns, name: str) -> Iterator[Document]:
    """The rows of a streamed dataset; UserError where it cannot be read or its columns hold something else."""
    try:
        for rows in _streamed(where).iter(batch_size=_BATCH):
            yield from _documents(rows, columns)
    # datasets, pyarrow, fsspec and the hub client share no exception type for "this cannot be read".
    except Exception as error:
        raise _unreadable(name, error) from error


def _streamed(where: dict[str, Any]) -> Any:
    if reason := unreachable(where["path"], "dataset"):
        raise ConnectionError(f"{reason}; give files, or try again when the hub can be reached")
    from datasets import load_dataset

    return load_dataset(**where, streaming=True)


def _unreadable(name: str, error: Exception) -> UserError:
    return UserError(f"--source {name} cannot be read: {first_line(error)}")


def _documents(rows: Mapping[str, Sequence[Any]], columns: Columns) -> Iterator[Document]:
    """The documents of a table; UserError where it lacks a column, or one holds something else."""
    _check_columns(rows, columns)
    for values in zip(*(rows[key] for key in columns.names)):
        yield _document(values, columns)


def _check_columns(names: Collection[str], columns: Columns) -> None:
    for key in columns.names:
        if key not in names:
            raise UserError(f"no column {key!r} among {', '.join(names)}; set --{_option(key, columns)}")


def _is_answered(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message["role"] == ASSISTANT for message in messages)


def _document(values: tuple[Any, ...], columns: Columns) -> Document:
    if columns.chat:
        if not isinstance(values[0], list):
            found = type(values[0]).__name__
            raise UserError(f"column {columns.texts[0]!r} holds {found}, not messages; set --text-key")
        return conversation(values[0])
    for key, value in zip(columns.names, values):
        allowed, wanted = columns.label_form if key == columns.label else (str | None, "text")
        if not isinstance(value, allowed):
            found = type(value).__name__
            raise UserError(f"column {key!r} holds {found}, not {wanted}; set --{_option(key, columns)}")
    texts = tuple(text or "" for text in values[: len(columns.texts)])
    if columns.label is None:
        return Document(texts)
    label = values[-1]
    return Document(texts, int(label) if isinstance(label, bool) else label)


def _option(key: str, columns: Columns) -> str:
    """The option of `megakernel prepare` that names a column."""
    if key == columns.label:
        return "labels"
    return "text-key" if key == columns.texts[0] else "second-text-key"


LIBRARY_PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
"""Packages that hold hundreds of functions in every Python from 3.10 on."""

_NO_LIBRARY_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def library_files() -> list[Path]:
    """Sources of this Python's standard library, the text that every machine has.

    Without tests: those are half of the bytes, and not installed everywhere.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = (file.relative_to(root) for file in root.rglob("*.py"))
    return [root / file for file in sorted(relative) if not _NO_LIBRARY_TEXT.intersection(file.parts)]


def library_functions() -> dict[str, list[str]]:
    """Columns `text`, a function of one of LIBRARY_PACKAGES, and `package`, the one it is from; no text twice."""
    root = Path(sysconfig.get_paths()["stdlib"])
    packages: dict[str, str] = {}
    for file in library_files():
        package = file.relative_to(root).parts[0]
        if package in LIBRARY_PACKAGES:
            source = file.read_text(encoding="utf-8")
            lines = source.split("\n")  # as ast counts them; splitlines also cuts at form feeds
            for function in _outermost(ast.parse(source)):
                own = lines[function.lineno - 1 : function.end_lineno]
                text = "\n".join(line.removeprefix(" " * function.col_offset) for line in own)
                packages.setdefault(text, package)
    return {"text": list(packages), "package": list(packages.values())}


def _outermost(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods; what is defined inside them is part of their text."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _outermost(child)

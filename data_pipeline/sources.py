"""Sources of documents: files, directory trees, the Python standard library, or a dataset of the hub.

Documents are streamed: a source holds at most a batch of rows or one part of a file. `datasets` is used only for the
hub: without it local tables are read five times as fast, one damaged row or empty file does not stop the reading, and
texts that look like a date or a list are not converted.
"""

import ast
import io
import json
import re
import sysconfig
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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
"""File extension -> format of files with a document per row; any other file is one document."""

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}

TSV = ".tsv"
"""Extension of tab-separated tables; without --labels such a file is a text."""

LONGEST_DOCUMENT = 64 * 2**20
"""Characters; a longer text file is split into several documents at line ends."""

_BATCH = 256
"""Rows of a table that are processed at once."""

HUB = "hf"
BENCHMARKS = ("lra", "glue", "sparsity")
"""Prefixes, before a colon, of sources that are not paths."""


class DocumentSource(ABC):
    """Documents in a fixed order."""

    endless = False
    """Whether it never ends."""

    has_splits = False
    """Whether documents name their split."""

    classes: tuple[Label, ...] = ()
    """All classes, if known before reading; otherwise the classes are those that occur."""

    def __init__(self, description: dict[str, Any], total: int | None = None):
        """description: the manifest's entry. total: number of documents, if known before reading."""
        self.description = description
        self.total = total
        self.skipped: Counter[str] = Counter()
        """Number of documents skipped by the latest iteration, by reason."""
        self._tokenizer: Tokenizer | None = None

    def __iter__(self) -> Iterator[Document]:
        """The documents with text (and an answer, if conversations); others are counted in `skipped`."""
        self.skipped.clear()
        for document in self._read():
            if not all(document.texts):
                self.skipped["empty"] += 1
            elif document.messages is not None and all(m["role"] != ASSISTANT for m in document.messages):
                self.skipped["no message of the assistant"] += 1
            else:
                yield document

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Set the tokenizer that will encode the documents read from now on."""
        self._tokenizer = tokenizer

    @abstractmethod
    def _read(self) -> Iterator[Document]:
        """All documents, including those with an empty text."""


class Files(DocumentSource):
    """Files in the given order; tables (`TABLES`) yield a document per row, other files one document each."""

    def __init__(self, files: list[Path], columns: Columns, description: dict[str, Any]):
        """Open nothing yet; the files exist."""
        has_rows = columns.label is not None or any(map(table_kind, files))
        super().__init__({**description, "files": len(files)}, None if has_rows else len(files))
        self._files = files
        self._columns = columns

    def _read(self) -> Iterator[Document]:
        for file in self._files:
            with _unreadable_as_user_error(str(file)):
                yield from self._read_file(file)

    def _read_file(self, file: Path) -> Iterator[Document]:
        if kind := table_kind(file):
            return self._read_json(file) if kind == "json" else self._read_parquet(file)
        if self._columns.label is not None:
            return self._read_tsv(file, self._columns.label)
        return self._read_text(file)

    def _read_json(self, file: Path) -> Iterator[Document]:
        rows = self._json_rows(file)
        # A row may lack a column that other rows have; if all of the first rows lack it, the column's name is wrong.
        first = list(islice(rows, _BATCH))
        if first:
            _check_columns(dict.fromkeys(chain(*first)), self._columns)
        for row in chain(first, rows):
            document = _document(tuple(map(row.get, self._columns.names)), self._columns)
            if all(map(is_unicode, (*document.texts, str(document.label)))):
                yield document
            else:
                self.skipped["not UTF-8"] += 1

    def _json_rows(self, file: Path) -> Iterator[dict[str, Any]]:
        import pyarrow

        compression = _COMPRESSIONS.get(file.suffix.lower())  # pyarrow detects no extension in capitals
        with (
            pyarrow.input_stream(str(file), compression) as stream,
            io.BufferedReader(stream, 2**20) as lines,
        ):
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

    def _read_parquet(self, file: Path) -> Iterator[Document]:
        from pyarrow.parquet import ParquetFile

        with ParquetFile(file) as table:
            _check_columns(table.schema_arrow.names, self._columns)
            for batch in table.iter_batches(_BATCH, columns=list(self._columns.names)):
                yield from _documents(batch.to_pydict(), self._columns)

    def _read_tsv(self, file: Path, label: str) -> Iterator[Document]:
        names, columns = tsv_names(file), self._columns
        if columns.texts == TEXT.texts and len(names) == 2 and label in names:
            columns = Columns(tuple(name for name in names if name != label), label)
        _check_columns(names, columns)
        for row in tsv_rows(file, names):
            if row is None or not row[label]:
                self.skipped["no labeled row"] += 1
            else:
                yield Document(tuple(row[name] for name in columns.texts), parse_class(row[label]))

    def _read_text(self, file: Path) -> Iterator[Document]:
        with file.open(encoding="utf-8", newline="") as stream:
            try:
                yield Document((_read_part(stream),))
                while part := _read_part(stream):
                    yield Document((part,))
            except UnicodeDecodeError:
                self.skipped["not UTF-8"] += 1


class Rows(DocumentSource):
    """The rows of a table, which a function reads."""

    def __init__(self, read: Callable[[], Iterator[Document]], description: dict[str, Any]):
        """read: reads all documents, anew at each call."""
        super().__init__(description)
        self._read_all = read

    def _read(self) -> Iterator[Document]:
        return self._read_all()


def hub_source(spec: str, split: str, columns: Columns) -> DocumentSource:
    """A split of hf:NAME[:CONFIG]. Opens nothing yet."""
    description = {"kind": "hub", **_hub_arguments(spec, split)}
    return Rows(partial(hub_documents, spec, split, columns), description)


def library_source(columns: Columns, description: dict[str, Any]) -> DocumentSource:
    """Functions of the standard library, labeled with their package. Reads nothing yet."""
    description = {**description, "functions of": list(LIBRARY_PACKAGES)}
    return Rows(lambda: _documents(library_functions(), columns), description)


def hub_documents(spec: str, split: str, columns: Columns) -> Iterator[Document]:
    """The rows of a split of hf:NAME[:CONFIG] as documents; UserError if it or its columns cannot be read."""
    with _unreadable_as_user_error(spec):
        for rows in _streamed(_hub_arguments(spec, split)).iter(batch_size=_BATCH):
            yield from _documents(rows, columns)


def hub_rows(spec: str, split: str, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a split of hf:NAME[:CONFIG]: these columns, as `datasets` decodes them."""
    with _unreadable_as_user_error(spec):
        for row in _streamed(_hub_arguments(spec, split)):
            yield {key: row[key] for key in keys}


def _hub_arguments(spec: str, split: str) -> dict[str, Any]:
    name, _, config = spec.removeprefix("hf:").partition(":")
    return {"path": name, "name": config or None, "split": split}


def tsv_names(file: Path) -> tuple[str, ...]:
    """The column names in a file's header line."""
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        return tuple(next(lines, "").rstrip("\r\n").split("\t"))


def tsv_rows(file: Path, names: Sequence[str], has_header: bool = True) -> Iterator[dict[str, str] | None]:
    """Each row, unquoted, as column -> text; None for a row that is not UTF-8 or has another number of fields.

    has_header: whether the first line is a header.
    """
    with file.open("rb") as lines:
        for line in islice(lines, int(has_header), None):
            try:
                fields = line.decode().rstrip("\r\n").split("\t")
            except UnicodeDecodeError:
                fields = []
            yield dict(zip(names, fields)) if len(fields) == len(names) else None


def parse_class(text: str) -> Label:
    """The class that a text names: an int if it is one."""
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else text


def table_kind(file: Path) -> str | None:
    """The format of a table; None for a plain text file."""
    return next((kind for ending, kind in TABLES.items() if file.name.lower().endswith(ending)), None)


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded as UTF-8; JSON and names of files can hold a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_part(stream: TextIO) -> str:
    return stream.read(LONGEST_DOCUMENT) + stream.readline(LONGEST_DOCUMENT)


def _streamed(where: dict[str, Any]) -> Any:
    if reason := unreachable(where["path"], "dataset"):
        raise ConnectionError(f"{reason}; give files, or try again when the hub can be reached")
    from datasets import load_dataset

    return load_dataset(**where, streaming=True)


@contextmanager
def _unreadable_as_user_error(name: str) -> Iterator[None]:
    try:
        yield
    # The file system, JSON, pyarrow, datasets and the hub client share no exception type for unreadable data.
    except Exception as error:
        raise UserError(f"--source {name} cannot be read: {first_line(error)}") from error


def _documents(rows: Mapping[str, Sequence[Any]], columns: Columns) -> Iterator[Document]:
    """The documents of a table; UserError if a column is missing or has the wrong type."""
    _check_columns(rows, columns)
    for values in zip(*(rows[key] for key in columns.names)):
        yield _document(values, columns)


def _check_columns(names: Collection[str], columns: Columns) -> None:
    for key in columns.names:
        if key not in names:
            raise UserError(f"no column {key!r} among {', '.join(names)}; set --{_option(key, columns)}")


def _document(values: tuple[Any, ...], columns: Columns) -> Document:
    if columns.chat:
        if not isinstance(values[0], list):
            type_name = type(values[0]).__name__
            raise UserError(f"column {columns.texts[0]!r} holds {type_name}, not messages; set --text-key")
        return conversation(values[0])
    label_form = (float, "a number") if columns.numbers else (int | str, "a class")
    for key, value in zip(columns.names, values):
        allowed, expected = label_form if key == columns.label else (str | None, "text")
        if not isinstance(value, allowed):
            type_name = type(value).__name__
            raise UserError(
                f"column {key!r} holds {type_name}, not {expected}; set --{_option(key, columns)}"
            )
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
    """Source files of this Python's standard library: text that every machine has.

    Without tests, which are half of the bytes and are not installed everywhere.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = (file.relative_to(root) for file in root.rglob("*.py"))
    return [root / file for file in sorted(relative) if not _NO_LIBRARY_TEXT.intersection(file.parts)]


def library_functions() -> dict[str, list[str]]:
    """Columns `text` (the functions of LIBRARY_PACKAGES, without duplicates) and `package`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    packages: dict[str, str] = {}
    for file in library_files():
        package = file.relative_to(root).parts[0]
        if package in LIBRARY_PACKAGES:
            source = file.read_text(encoding="utf-8")
            lines = source.split("\n")  # as ast counts lines; splitlines also splits at form feeds
            for function in _outermost(ast.parse(source)):
                function_lines = lines[function.lineno - 1 : function.end_lineno]
                text = "\n".join(line.removeprefix(" " * function.col_offset) for line in function_lines)
                packages.setdefault(text, package)
    return {"text": list(packages), "package": list(packages.values())}


def _outermost(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods that are not nested in other functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _outermost(child)

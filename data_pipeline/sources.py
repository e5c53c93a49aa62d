"""Sources of documents: files, directory trees, the Python standard library, or a dataset of the hub.

Documents are streamed: a source holds at most a batch of rows or one part of a file. `datasets` is used only for the
hub: without it local tables are read five times as fast, one damaged row or empty file does not stop the reading, and
texts that look like a date or a list are not converted.
"""

import ast
import json
import re
import sysconfig
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, TextIO

from data_pipeline.accounting import Counts, check_bad_rows
from data_pipeline.chat import ASSISTANT, conversation
from data_pipeline.document import Columns, Document, Label
from data_pipeline.files import CSV, TSV, File, is_damage, open_decoded
from data_pipeline.manifest import SourcePart
from data_pipeline.rows import (
    BATCH,
    LONGEST_DOCUMENT,
    NOT_UNICODE,
    BadRow,
    check_columns,
    column_option,
    read_rows,
    values_of,
)
from data_pipeline.tokenizers import Tokenizer, unreachable
from megakernel.config.errors import UserError, first_line
from megakernel.config.extras import need

HUB = "hf"
GETTEXT = "gettext"
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
        self.files: tuple[File, ...] = ()
        """All files that were found, if it is one of files."""

        self.max_bad_rows: float | None = None
        """See `check_bad_rows`."""

        self.counts = Counts()
        """What the latest iteration has read."""

        self.finished = Counts()
        """What it had read when it came to the end of a file."""

        self._place = " ".join(str(value) for value in description.values())
        self._tokenizer: Tokenizer | None = None

    @property
    def skipped(self) -> Counter[str]:
        """Number of documents skipped by the latest iteration, by reason."""
        return self.counts.skipped

    @property
    def identity(self) -> list[list[Any]] | None:
        """What tells whether the same source is read as before; None if it cannot be read from a later file on."""
        return None

    start = Counts()
    """What an earlier process has read: every iteration begins after the files that it read to their end."""

    def __iter__(self) -> Iterator[Document]:
        """The documents with text (and an answer, if conversations); others are counted in `skipped`.

        Raises UserError for too many bad rows.
        """
        self.counts = self.start.model_copy(deep=True)
        self.finished = self.start
        for document in self._read():
            if isinstance(document, BadRow):
                self.counts.add_bad(self._place, document.number, document.reason)
                check_bad_rows(self.counts, self.max_bad_rows, at_end=False)
            elif document.is_pair and not all(map(str.strip, document.texts)):
                self.skipped["one side is empty"] += 1
            elif not all(document.texts):
                self.skipped["empty"] += 1
            elif document.messages is not None and all(m["role"] != ASSISTANT for m in document.messages):
                self.skipped["no message of the assistant"] += 1
            else:
                self.counts.documents += 1
                yield document
        check_bad_rows(self.counts, self.max_bad_rows, at_end=True)

    def part(self, number: int, count: int) -> "DocumentSource":
        """Part `number` (from 0 on) of `count` parts, each of consecutive files; together they are the whole source.

        Raises UserError if it has no files, or fewer than parts.
        """
        raise UserError(f"--part {number}/{count} chooses files, and {self._place} has none; leave it out")

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Set the tokenizer that will encode the documents read from now on."""
        self._tokenizer = tokenizer

    @abstractmethod
    def _read(self) -> Iterator[Document | BadRow]:
        """All documents, including those with an empty text."""


class Files(DocumentSource):
    """Files in the given order: tables yield a document per row, others one document each."""

    def __init__(self, files: Sequence[File], columns: Columns, description: dict[str, Any]):
        """files: as `files.choose` returns them. Opens nothing yet."""
        read = [file for file in files if file.format is not None]
        has_rows = any(file.is_table for file in read)
        super().__init__({**description, "files": len(read)}, None if has_rows else len(read))
        self.files = tuple(files)
        self._read_files = read
        self._columns = columns

    @property
    def identity(self) -> list[list[Any]]:
        """The path, size and time of change of each file that is read."""
        stats = ((file.path, file.path.stat()) for file in self._read_files)
        return [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in stats]

    def part(self, number: int, count: int) -> "Files":
        """See `DocumentSource`; the parts have about the same size in bytes. Files that are left out go with others."""
        identity = self.identity
        if count > len(identity):
            raise UserError(
                f"--part {number}/{count}: the source has {len(identity)} files that are read, and a part has at least "
                f"one; give at most {len(identity)} parts, or smaller files"
            )
        places = [place for place, file in enumerate(self.files) if file.format is not None]
        sizes = list(accumulate(size for _, size, _ in identity))
        # Part k begins with the first file whose end is behind k / count of all bytes; each other one keeps a file.
        starts = [0]
        for part in range(1, count):
            start = bisect_right(sizes, part * sizes[-1] // count)
            starts.append(min(max(start, starts[-1] + 1), len(places) - count + part))
        cuts = [0, *(places[start] for start in starts[1:]), len(self.files)]
        digest = sha256(json.dumps(identity).encode()).hexdigest()
        part_of_source = asdict(SourcePart(number, count, digest))
        chosen = self.files[cuts[number] : cuts[number + 1]]
        return Files(chosen, self._columns, {**self.description, "part": part_of_source})

    def _read(self) -> Iterator[Document | BadRow]:
        for number, file in enumerate(self._read_files):
            if number < self.counts.files:  # an earlier process has read it
                continue
            self._place = str(file.path)
            with unreadable_as_user_error(str(file.path)):
                yield from self._read_rows(file) if file.is_table else self._read_text(file)
            self.counts.files = number + 1
            self.finished = self.counts.model_copy(deep=True)

    def _read_rows(self, file: File) -> Iterator[Document | BadRow]:
        columns = self._columns
        if other := file.columns_of_labelled(columns):
            columns = replace(columns, texts=other)
        if file.format in (CSV, TSV):
            check_columns(file.sample, columns)
        rows = read_rows(file, columns)
        # A row that lacks a column is a bad one; if all of the first rows lack it, the column's name is wrong.
        first = list(islice(rows, BATCH))
        if good := [row[1] for row in first if not isinstance(row, BadRow)]:
            check_columns(good, columns)
        is_text = file.format in (CSV, TSV)  # of numbers and labels, too
        for row in chain(first, rows):
            if isinstance(row, BadRow):
                yield row
                continue
            number = row[0]
            try:
                values = values_of(row[1], columns)
                if is_text and columns.label is not None:
                    if not values[-1]:
                        self.counts.skipped["no labeled row"] += 1
                        continue
                    values = *values[:-1], float(values[-1]) if columns.numbers else parse_class(values[-1])
                document = _document(values, columns)
            except UserError as error:
                yield BadRow(number, str(error))
                continue
            if not all(map(is_unicode, (*document.texts, str(document.label)))):
                yield BadRow(number, NOT_UNICODE)
            elif document.messages is not None:
                yield document._replace(place=(self._place, number))
            else:
                yield document

    def _read_text(self, file: File) -> Iterator[Document | BadRow]:
        parts = 0
        with open_decoded(file, "strict") as stream:
            try:
                while (part := _read_part(stream)) or not parts:
                    parts += 1
                    yield Document((part,))
            except (UnicodeDecodeError, EOFError, OSError, ValueError) as error:
                is_unicode_error = isinstance(error, UnicodeDecodeError)
                if not (is_unicode_error or is_damage(error)):
                    raise
                reason = NOT_UNICODE if is_unicode_error else f"damaged ({first_line(error)})"
                if parts:
                    reason += f" from character {parts * LONGEST_DOCUMENT:,} on"
                self.counts.left_out[self._place] = reason


class TableRows(DocumentSource):
    """The rows of a table, which a function reads."""

    def __init__(
        self, read: Callable[[], Iterator[Document | BadRow]], name: str, description: dict[str, Any]
    ):
        """read: reads all documents, anew at each call. name: of the table, for errors."""
        super().__init__(description)
        self._read_all = read
        self._place = name

    def _read(self) -> Iterator[Document | BadRow]:
        return self._read_all()


def hub_source(spec: str, split: str, columns: Columns) -> DocumentSource:
    """A split of hf:NAME[:CONFIG]. Opens nothing yet."""
    description = {"kind": "hub", **_hub_arguments(spec, split)}
    return TableRows(partial(_hub_documents, spec, split, columns), spec, description)


def library_source(columns: Columns, description: dict[str, Any]) -> DocumentSource:
    """Functions of the standard library, labeled with their package. Reads nothing yet."""
    description = {**description, "functions of": list(LIBRARY_PACKAGES)}
    return TableRows(lambda: _documents(library_functions(), columns, "stdlib"), "stdlib", description)


def hub_documents(spec: str, split: str, columns: Columns) -> Iterator[Document]:
    """The rows of a split of hf:NAME[:CONFIG] as documents; UserError if it, its columns or a row cannot be read."""
    for document in _hub_documents(spec, split, columns):
        if isinstance(document, BadRow):
            raise UserError(f"--source {spec} cannot be read: row {document.number}: {document.reason}")
        yield document


def _hub_documents(spec: str, split: str, columns: Columns) -> Iterator[Document | BadRow]:
    need(f"--source {spec}", "datasets")
    with unreadable_as_user_error(spec):
        number = 1
        for rows in _streamed(_hub_arguments(spec, split)).iter(batch_size=BATCH):
            yield from _documents(rows, columns, spec, number)
            number += len(next(iter(rows.values()), ()))


def hub_rows(spec: str, split: str, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a split of hf:NAME[:CONFIG]: these columns, as `datasets` decodes them."""
    need(f"--source {spec}", "datasets")
    with unreadable_as_user_error(spec):
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
def unreadable_as_user_error(name: str) -> Iterator[None]:
    """Turn any error into one line that names the source."""
    try:
        yield
    # The file system, JSON, pyarrow, datasets and the hub client share no exception type for unreadable data.
    except Exception as error:
        raise UserError(f"--source {name} cannot be read: {first_line(error)}") from error


def _documents(
    table: Mapping[str, Sequence[Any]], columns: Columns, name: str, first: int = 1
) -> Iterator[Document | BadRow]:
    """The documents of a table; UserError if a column is missing. first: the number of its first row."""
    rows = [dict(zip(table, values)) for values in zip(*table.values())]
    check_columns([*rows, dict.fromkeys(table)], columns)
    for number, row in enumerate(rows, first):
        try:
            document = _document(values_of(row, columns), columns)
            yield document if document.messages is None else document._replace(place=(name, number))
        except UserError as error:
            yield BadRow(number, str(error))


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
                f"column {key!r} holds {type_name}, not {expected}; set --{column_option(key, columns)}"
            )
    texts = tuple(text or "" for text in values[: len(columns.texts)])
    if columns.label is None:
        return Document(texts)
    label = values[-1]
    return Document(texts, int(label) if isinstance(label, bool) else label)


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

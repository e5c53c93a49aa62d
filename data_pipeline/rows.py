"""Rows of tables: JSON, CSV, TSV, Parquet and Arrow. A row that cannot be read is a `BadRow`; the reading goes on."""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, TextIO, TypeAlias

from data_pipeline.document import Columns
from data_pipeline.files import (
    ARROW,
    CSV,
    JSON_LINES,
    JSON_VALUES,
    PARQUET,
    TSV,
    File,
    delimiter,
    has_column,
    is_damage,
    open_decoded,
    open_decompressed,
    split_header,
)
from megakernel.config.errors import UserError, first_line
from megakernel.config.extras import need

BATCH = 256
"""Rows that are converted at once."""

LONGEST_DOCUMENT = 64 * 2**20
"""Characters; a longer text file is split into several documents at line ends."""

NOT_UNICODE = "not UTF-8"


class BadRow(NamedTuple):
    """A row that cannot be read."""

    number: int
    """Counted from 1; in files with a row a line, the line."""

    reason: str

    to_end: bool = False
    """Whether nothing that follows in the file can be read, either."""


Row: TypeAlias = Mapping[str, Any]


def read_rows(file: File, columns: Columns) -> Iterator[tuple[int, Row] | BadRow]:
    """The rows of a table with their numbers. Raises OSError for errors of the file system."""
    assert file.format is not None
    number = 0
    try:
        for row in _READERS[file.format](file, columns):
            number = row[0]
            yield row
    except Exception as error:  # of pyarrow, zlib, lzma, codecs, ...
        if not (is_damage(error) or isinstance(error, UnicodeDecodeError)):
            raise
        yield BadRow(number + 1, f"the file is damaged from here on ({first_line(error)})", to_end=True)


def _json_lines(file: File, columns: Columns) -> Iterator[tuple[int, Row] | BadRow]:
    for number, line in enumerate(_lines(file), 1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except UnicodeDecodeError:
            yield BadRow(number, NOT_UNICODE)
        except json.JSONDecodeError as error:
            yield BadRow(
                number, f"no JSON from character {error.pos + 1} on: {error.msg.removesuffix(' at')}"
            )
        except (ValueError, RecursionError) as error:  # digits or brackets without end
            yield BadRow(number, first_line(error))
        else:
            yield (number, row) if isinstance(row, dict) else _no_object(number, row)


def _lines(file: File) -> Iterator[bytes]:
    """The lines of a file in UTF-8."""
    if not file.encoding.startswith("utf-8"):
        with open_decoded(file) as text:
            yield from (line.encode() for line in text)
        return
    with open_decompressed(file.path, file.compression) as stream:
        if file.encoding == "utf-8-sig":
            stream.read(3)
        yield from stream


def _no_object(number: int, row: Any) -> BadRow:
    return BadRow(number, f"holds a {type(row).__name__}, not one row in braces")


def _json_values(file: File, columns: Columns) -> Iterator[tuple[int, Row] | BadRow]:
    with open_decoded(file) as text:
        for number, row in enumerate(_values(text), 1):
            if isinstance(row, ValueError | RecursionError):
                yield BadRow(number, f"{first_line(row)}, and what follows cannot be read", to_end=True)
            else:
                yield (number, row) if isinstance(row, dict) else _no_object(number, row)


_CUT = 32
"""Characters before the end of a text within which an error may come from its end."""


def _values(stream: TextIO) -> Iterator[Any]:
    """The elements of a JSON array, or JSON values one after another; an error as the last one if one is not JSON."""
    size = 2**20
    text, position = stream.read(size), 0
    start = re.match(r"\s*\[", text)
    if start is not None:
        position = start.end()
    between = re.compile(r"[\s,]*" if start is not None else r"\s*")
    decoder = json.JSONDecoder()
    while True:
        match = between.match(text, position)
        assert match is not None
        position = match.end()
        if start is not None and text[position : position + 1] == "]":
            return
        error: ValueError | RecursionError | None = None
        if position < len(text):
            try:
                value, position = decoder.raw_decode(text, position)
            except (ValueError, RecursionError) as caught:
                error = caught
            else:
                yield value
                continue
            at = getattr(error, "pos", 0)
            if not str(error).startswith("Unterminated string") and at < len(text) - _CUT:
                yield error
                return
        more = stream.read(size)
        if not more:
            if error is not None or start is not None:
                yield error or ValueError("the array has no end")
            return
        text, position, size = text[position:] + more, 0, 2 * size


def _csv(file: File, columns: Columns) -> Iterator[tuple[int, Row] | BadRow]:
    csv.field_size_limit(LONGEST_DOCUMENT)
    with open_decoded(file) as text:
        header = text.readline()
        if header.count('"') % 2:
            yield BadRow(1, "the header's quotes have no end", to_end=True)
            return
        names = split_header(header, CSV)
        lines = csv.reader(text, delimiter=delimiter(header))
        while True:
            number = lines.line_num + 2  # the header is line 1
            try:
                fields = next(lines)
            except StopIteration:
                return
            except csv.Error as error:
                yield BadRow(number, str(error))
                continue
            if fields:
                yield _separated(number, names, fields)


def _tsv(file: File, columns: Columns) -> Iterator[tuple[int, Row] | BadRow]:
    with open_decoded(file) as text:
        names = split_header(text.readline(), TSV)
        for number, line in enumerate(text, 2):
            if not line.isspace():
                yield _separated(number, names, line.rstrip("\r\n").split("\t"))


def _separated(number: int, names: list[str], fields: list[str]) -> tuple[int, Row] | BadRow:
    if len(fields) != len(names):
        return BadRow(number, f"has {len(fields)} fields where the header has {len(names)}")
    return number, dict(zip(names, fields))


def _parquet(file: File, columns: Columns) -> Iterator[tuple[int, Row] | BadRow]:
    need("Parquet", "pyarrow")
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file.path) as table:
        names = _top_names(table.schema_arrow, columns)
        first = 1
        for group in range(table.num_row_groups):
            number, count = first, table.metadata.row_group(group).num_rows
            try:
                for batch in table.iter_batches(BATCH, row_groups=[group], columns=names):
                    yield from _batch_rows(batch, number)
                    number += batch.num_rows
            except Exception as error:
                if not is_damage(error):
                    raise
                reason = f"rows {number:,} to {first + count - 1:,} are damaged ({first_line(error)})"
                yield BadRow(number, reason)
            first += count


def _arrow(file: File, columns: Columns) -> Iterator[tuple[int, Row] | BadRow]:
    need("Arrow", "pyarrow")
    import pyarrow

    with pyarrow.memory_map(str(file.path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        names = _top_names(reader.schema, columns)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
        number = 1
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH):
                part = batch.select(names).slice(start, BATCH)
                yield from _batch_rows(part, number)
                number += part.num_rows


def _top_names(schema: Any, columns: Columns) -> list[str]:
    """The table's columns to read: those that are named, and those that hold a column that a dotted path names."""

    def tree(fields: Any) -> Row:
        return {field.name: tree(field.type) if _is_struct(field.type) else None for field in fields}

    check_columns([tree(schema)], columns)
    names = [key if key in schema.names else key.partition(".")[0] for key in columns.names]
    return list(dict.fromkeys(names))


def _is_struct(arrow_type: Any) -> bool:
    import pyarrow

    return pyarrow.types.is_struct(arrow_type)


def check_columns(rows: Sequence[Row], columns: Columns) -> None:
    """UserError if all rows lack one of `columns`."""
    for key in columns.names:
        if not any(has_column(row, key) for row in rows):
            raise _no_column(key, rows, columns)


def _no_column(key: str, rows: Sequence[Row], columns: Columns) -> UserError:
    names = list(islice(dict.fromkeys(chain.from_iterable(map(_paths, rows))), 20))
    among = f" among {', '.join(names)}" if names else ""
    more = ", ..." if len(names) == 20 else ""
    return UserError(f"no column {key!r}{among}{more}; set --{column_option(key, columns)}")


def column_option(key: str, columns: Columns) -> str:
    """The option of `megakernel prepare` that names a column."""
    if key == columns.label:
        return "labels"
    return "text-key" if key == columns.texts[0] else "second-text-key"


def _paths(row: Row, prefix: str = "") -> Iterator[str]:
    """The columns of a row, nested ones as dotted paths."""
    for key, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from _paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


_ABSENT = object()


def values_of(row: Row, columns: Columns) -> tuple[Any, ...]:
    """The values of `columns`, which dotted paths may name; UserError if the row lacks one, which is not null there."""
    values = tuple(_value_of(row, key) for key in columns.names)
    for key, value in zip(columns.names, values):
        if value is _ABSENT:
            raise _no_column(key, [row], columns)
    return values


def _value_of(row: Row, key: str) -> Any:
    if key in row:
        return row[key]
    first, dot, rest = key.partition(".")
    inner = row.get(first, _ABSENT) if dot else _ABSENT
    if inner is None:  # a null structure has null columns
        return None
    return _value_of(inner, rest) if isinstance(inner, Mapping) else _ABSENT


def _batch_rows(batch: Any, number: int) -> Iterator[tuple[int, Row] | BadRow]:
    try:
        columns = batch.to_pydict()
        for offset, values in enumerate(zip(*columns.values())):
            yield number + offset, dict(zip(columns, values))
        return
    except (UnicodeDecodeError, ValueError, OverflowError):
        pass  # one value cannot be converted
    for offset in range(batch.num_rows):
        try:
            yield number + offset, batch.slice(offset, 1).to_pylist()[0]
        except UnicodeDecodeError:
            yield BadRow(number + offset, NOT_UNICODE)
        except (ValueError, OverflowError) as error:
            yield BadRow(number + offset, first_line(error))


_READERS: dict[str, Callable[[File, Columns], Iterator[tuple[int, Row] | BadRow]]] = {
    JSON_LINES: _json_lines,
    JSON_VALUES: _json_values,
    CSV: _csv,
    TSV: _tsv,
    PARQUET: _parquet,
    ARROW: _arrow,
}

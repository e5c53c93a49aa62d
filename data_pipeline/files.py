"""What files hold, by their content and their name: rows of a table, a text, or neither; and which of them are read.

A file is decompressed (gzip, zstd, xz, bz2, lz4) and its text decoded (UTF-8, with or without a byte order mark; UTF-16
and UTF-32 with one) whatever its name says. Then

* Parquet and Arrow files, and files named .jsonl, .jl, .jsonlines or .ndjson, are tables;
* so are .csv and .tsv files, and any text whose first line is a JSON object, or that is a JSON array of objects;
* a .json file that is one object is a row if it has the text column;
* what is no text (`_binary_name`) is left out by its name.

`choose` says what happens to the files of a folder.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from data_pipeline.document import TEXT, Columns
from megakernel.config.errors import UserError
from megakernel.config.extras import need

JSON_LINES = "JSON lines"
JSON_VALUES = "JSON"
CSV = "CSV"
TSV = "TSV"
PARQUET = "Parquet"
ARROW = "Arrow"
CATALOG = "message catalog"
TEXT_FILE = "text"
"""Formats; all but the last are tables."""

_JSON_LINES_NAMES = (".jsonl", ".jl", ".jsonlines", ".ndjson")
"""Extensions of files that are JSON lines whatever they hold: what is none in them is a bad row."""

_MAGIC_OF_TABLES = {b"PAR1": PARQUET, b"ARROW1": ARROW}
"""First bytes -> format."""

_BINARY_TABLES = {".parquet": PARQUET, ".arrow": ARROW, ".feather": ARROW}
"""Extension -> format of files that are such tables, or damaged ones, whatever they hold."""

_SEPARATED = {".csv": CSV, ".tsv": TSV}

EMPTY = "empty"
"""What an empty file is."""

HIDDEN = "hidden"
"""What a file or folder is whose name begins with a dot."""

TABLE_ENDINGS = (*_JSON_LINES_NAMES, *_BINARY_TABLES, ".json", *_SEPARATED)
"""Usual names of tables, for messages."""

_COMPRESSION_NAMES = (".gz", ".gzip", ".zst", ".zstd", ".xz", ".bz2", ".lz4")

_HEAD = 2**16
"""Bytes at the beginning of a file that say what it holds."""

_LONGEST_FIRST_ROW = 2**26

_MAGIC = (
    (b"PK\x03\x04", "a zip archive; unpack it"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"MMIDIDX\x00\x00", "the index of Megatron's token files; give their prefix to data.train"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"%PDF-", "a PDF; convert it to text"),
    (b"\x89PNG\r\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"\x7fELF", "a program"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it"),
    (b"Rar!\x1a\x07", "a RAR archive; unpack it"),
    (b"\x1f\x9d", "compressed with compress; decompress it"),
    (b"\xff\x06\x00\x00sNaPpY", "compressed with snappy; decompress it"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"Obj\x01", "an Avro file; convert it to Parquet"),
    (b"ORC", "an ORC file; convert it to Parquet"),
    (b"GGUF", "weights (GGUF)"),
)
"""First bytes -> what a file is that is not read."""

_ZIP_NAMES = {
    ".npz": "NumPy arrays",
    ".pt": "a PyTorch file",
    ".pth": "a PyTorch file",
    ".ckpt": "a PyTorch file",
    ".bin": "a PyTorch file",
    ".docx": "an office document; convert it to text",
    ".xlsx": "an office document; save it as CSV",
    ".pptx": "an office document; convert it to text",
    ".odt": "an office document; convert it to text",
    ".epub": "a book (EPUB); convert it to text",
}
_PICKLES = {
    ".pkl": "a pickle",
    ".pickle": "a pickle",
    ".pt": "a PyTorch file",
    ".pth": "a PyTorch file",
    ".ckpt": "a PyTorch file",
    ".bin": "a PyTorch file",
}

_LFS = b"version https://git-lfs.github.com/spec/"

ABOUT_FILES = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|datasheet|dataset_?infos?\.|dataset_dict\.|state\.|_success"
    r"|manifest|sha\d*sums?|md5sums?|checksums?)|.*\.(crc|md5|sha1|sha256|sha512|lock|metadata|sig|asc)$",
    re.IGNORECASE,
)
"""Names of files about other files; they alone do not make a folder one of texts."""


@dataclass(frozen=True, eq=False)
class File:
    """A file and what it holds."""

    path: Path

    format: str | None = None
    """One of the formats above; None: it is left out."""

    what: str = ""
    """The format, compression and encoding in words, or why it is left out."""

    compression: str | None = None

    encoding: str = "utf-8"

    named_table: bool = False
    """Whether its name says that it is a table."""

    one_object: bool = False
    """Whether it is a JSON object of its own."""

    sample: tuple[Mapping[str, Any], ...] = ()
    """The first rows of a table whose name does not say that it is one, without their values."""

    @property
    def is_table(self) -> bool:
        """Whether it has rows."""
        return self.format not in (None, TEXT_FILE)

    def left_out(self, why: str) -> "File":
        """The same file, left out."""
        return replace(self, format=None, what=why)

    def as_text(self, what: str) -> "File":
        """The same file, read as a text."""
        return replace(self, format=TEXT_FILE, what=what)

    def has_text_column(self, columns: Columns) -> bool:
        """Whether the sample has the first text column."""
        if any(has_column(row, columns.texts[0]) for row in self.sample):
            return True
        return len(self.columns_of_labelled(columns)) == 1

    def columns_of_labelled(self, columns: Columns) -> tuple[str, ...]:
        """Of a .csv or .tsv file of a label and one other column, that other column."""
        names = tuple(self.sample[0]) if self.sample and self.format in (CSV, TSV) else ()
        if columns.texts == TEXT.texts and len(names) == 2 and columns.label in names:
            return tuple(name for name in names if name != columns.label)
        return ()


def has_column(row: Mapping[str, Any], key: str) -> bool:
    """Whether a row has a column, or a dotted path to a nested one."""
    if key in row:
        return True
    first, dot, rest = key.partition(".")
    inner = row.get(first)
    return bool(dot) and isinstance(inner, Mapping) and has_column(inner, rest)


def is_damage(error: Exception) -> bool:
    """Whether an error of reading comes from a file's content, not from the file system."""
    if isinstance(error, EOFError | zlib.error | lzma.LZMAError | gzip.BadGzipFile):
        return True
    if isinstance(error, OSError):
        return error.errno is None
    return type(error).__module__.startswith("pyarrow")


def recognize(path: Path) -> File:
    """What a file holds. Raises UserError for a file that is not there yet (Git LFS), OSError if it cannot be read."""
    with path.open("rb") as stream:
        head = stream.read(_HEAD)
    if not head:
        return File(path, what=EMPTY)
    if head.startswith(_LFS):
        raise UserError("it is a pointer of Git LFS and not the file; run `git lfs pull` in its repository")
    name, ending = _ending(path)
    if why := _binary_name(head, path, ending):
        return File(path, what=why)
    named = _BINARY_TABLES.get(ending)
    table = next((table for magic, table in _MAGIC_OF_TABLES.items() if head.startswith(magic)), named)
    if table is not None:
        if name.startswith("cache-") and ending == ".arrow":
            return File(path, what="a cache of `datasets`")
        return File(path, table, table, named_table=True)
    compression = _compression(head)
    if compression is not None:
        try:
            with open_decompressed(path, compression) as stream:
                head = stream.read(_HEAD)
        except Exception as error:
            if not is_damage(error):
                raise
            head = b""
            if ending not in _JSON_LINES_NAMES:
                return File(path, what=f"damaged {compression}")
        if not head and ending not in _JSON_LINES_NAMES:
            return File(path, what=f"empty, {compression}")
        if _compression(head) is not None:
            return File(path, what="compressed twice; decompress it once")
        if why := _binary_name(head, path, ending):
            return File(path, what=f"{why} ({compression})")
        if head.startswith(tuple(_MAGIC_OF_TABLES)):
            return File(path, what=f"Parquet or Arrow inside {compression}; decompress it")
    return _recognize_text(File(path, compression=compression, encoding=_encoding(head)), head, ending)


def _recognize_text(file: File, head: bytes, ending: str) -> File:
    encoding = {"utf-16": "UTF-16", "utf-32": "UTF-32"}.get(file.encoding)
    details = "".join(f", {part}" for part in (file.compression, encoding) if part)
    decoder = codecs.getincrementaldecoder(file.encoding)
    is_whole = len(head) < _HEAD
    text = decoder("replace").decode(head, is_whole).removeprefix("\ufeff")

    def found(table: str, sample: Iterable[Mapping[str, Any]] = (), one_object: bool = False) -> File:
        named = ending in _JSON_LINES_NAMES
        shapes = {str(shape): shape for shape in map(_shape, sample)}
        return replace(
            file,
            format=table,
            what=table + details,
            named_table=named,
            one_object=one_object and not named,
            sample=() if named else tuple(shapes.values()),
        )

    if "\x00" in text:
        return file.left_out("binary (it has NUL bytes)")
    if ending in _SEPARATED:
        header = next(iter(text.splitlines()), "")
        return found(_SEPARATED[ending], [dict.fromkeys(split_header(header, _SEPARATED[ending]))])
    if (form := _json_form(file, text, is_whole)) is not None:
        table, rows, one_object = form
        if ending in (*_JSON_LINES_NAMES, ".json") or not one_object:
            return found(table, rows, one_object)
    elif ending in _JSON_LINES_NAMES:
        return found(JSON_LINES)
    try:
        decoder().decode(head, is_whole)
    except UnicodeDecodeError:
        return file.left_out(f"not {encoding or 'UTF-8'}")
    return found(TEXT_FILE)


def _json_form(file: File, text: str, is_whole: bool) -> tuple[str, Sequence[Mapping[str, Any]], bool] | None:
    """The format of a text of JSON objects, the first of them, and whether there is no other; None for another text.

    text: the file's beginning. is_whole: whether it is all of the file.
    """
    if re.match(r"\s*\[\s*\{\s*[\"}]", text):
        return JSON_VALUES, list(_objects(text, text.index("[") + 1)), False
    if not re.match(r"\s*\{\s*[\"}]", text):
        return None
    if not is_whole and next(_objects(text), None) is None:  # its first object is longer
        with open_decoded(file, "replace") as stream:
            text = stream.read(_LONGEST_FIRST_ROW)
    first, *others = [line for line in text.split("\n") if line.strip()]
    rows = [row for line in (first, *others[:64]) if (row := _json_object(line)) is not None]
    if _json_object(first) is not None:
        return JSON_LINES, rows, not others
    if values := list(islice(_objects(text), 2)):
        return JSON_VALUES, values, len(values) == 1
    return (JSON_LINES, rows, False) if rows else None


def _objects(text: str, position: int = 0) -> Iterator[Mapping[str, Any]]:
    """The JSON objects from a position of a text on, until one is not whole."""
    start = re.compile(r"[\s,]*(?=\{)")
    while (match := start.match(text, position)) is not None:
        try:
            value, position = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):
            return
        yield value


def _shape(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: _shape(value) if isinstance(value, Mapping) else None for key, value in row.items()}


def _json_object(line: str) -> Mapping[str, Any] | None:
    """The JSON object that a line is."""
    if not line.lstrip().startswith("{"):
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def split_header(line: str, table: str) -> list[str]:
    """The names in the first line of a .csv or .tsv file; a .csv may use another separator than the comma."""
    if table == TSV:
        return line.rstrip("\r\n").split("\t")
    return next(csv.reader([line], delimiter=delimiter(line)), [])


def delimiter(header: str) -> str:
    """The separator of a .csv file's header line."""
    return max(",;\t|", key=header.count) if re.search(r"[,;\t|]", header) else ","


def _ending(path: Path) -> tuple[str, str]:
    """A file's name, and its extension without that of a compression, in small letters."""
    name = path.name.lower()
    stem = Path(name)
    while stem.suffix in _COMPRESSION_NAMES:
        stem = stem.with_suffix("")
    return name, stem.suffix


def _compression(head: bytes) -> str | None:
    for magic, name in (
        (b"\x1f\x8b", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"\x50\x2a\x4d\x18", "zstd"),
        (b"\xfd7zXZ\x00", "xz"),
        (b"\x04\x22\x4d\x18", "lz4"),
    ):
        if head.startswith(magic):
            return name
    return "bz2" if re.match(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", head) else None


def open_decompressed(path: Path, compression: str | None) -> BinaryIO:
    """A buffered stream of a file's bytes."""
    if compression is None:
        return path.open("rb")
    if compression == "gzip":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if compression == "bz2":
        return cast(BinaryIO, bz2.open(path, "rb"))
    if compression == "xz":
        return cast(BinaryIO, lzma.open(path, "rb"))
    need(compression, "pyarrow")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression), 2**20)


@contextmanager
def open_decoded(file: File, errors: str = "surrogateescape") -> Iterator[io.TextIOWrapper]:
    """A stream of a file's text, with its own line ends."""
    if file.encoding.startswith(("utf-16", "utf-32")) and errors == "surrogateescape":
        errors = "strict"  # these codecs have no such bytes
    with (
        open_decompressed(file.path, file.compression) as stream,
        io.TextIOWrapper(stream, encoding=file.encoding, errors=errors, newline="") as text,
    ):
        yield text


def _encoding(head: bytes) -> str:
    if head.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    return "utf-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"


def _binary_name(head: bytes, path: Path, ending: str) -> str | None:
    """What a file is that holds no text; None if it may hold some."""
    if ending == ".bin" and _starts_with(path.with_suffix(".idx"), b"MMIDIDX"):
        return f"Megatron's tokens and no text; train on them with data.train={path.with_suffix('')}"
    if head.startswith(b"PK") and ending in _ZIP_NAMES:
        return _ZIP_NAMES[ending]
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it"
    if re.match(rb"\x80[\x02-\x05]", head) or ending in (".pkl", ".pickle"):
        return _PICKLES.get(ending, "a pickle")
    if head[8:9] == b"{" and ending == ".safetensors":
        return "weights (safetensors)"
    return None


def _starts_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(len(magic)) == magic
    except OSError:
        return False


def choose(files: Iterable[File], columns: Columns, *, by_name: bool) -> list[File]:
    """What is read of a folder's files, and how.

    by_name: whether the user chose them by name patterns. Otherwise a folder that holds tables is read as tables, and
    its other files are left out. A .json, .csv or .tsv file, or a text of JSON rows, that lacks the text column is a
    text if texts are beside it and tables are not. Files of one JSON object are tables if the texts are not more.
    """
    files = list(files)
    text_key = columns.texts[0]
    texts = [file for file in files if file.format == TEXT_FILE and not ABOUT_FILES.match(file.path.name)]
    rows = {file for file in files if file.is_table and (file.named_table or file.has_text_column(columns))}
    objects = {file for file in rows if file.one_object}
    if len(objects) < len(texts) and objects == rows:
        rows = set()
    if not rows and not texts:  # then the error names the columns that there are
        rows = {file for file in files if file.is_table and not ABOUT_FILES.match(file.path.name)}
    chosen = []
    for file in files:
        if file.format is None or file in rows:
            chosen.append(file)
        elif file.is_table:
            what = f"{file.what} without column {text_key}"
            if file.has_text_column(columns):
                what = f"{file.what}, one object"
            chosen.append(
                file.left_out(f"{what}, beside tables") if rows and not by_name else file.as_text(what)
            )
        else:
            chosen.append(file.left_out("text beside tables") if rows and not by_name else file)
    return chosen

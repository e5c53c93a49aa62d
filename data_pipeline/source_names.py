"""What `--source` names: files, directories, a dataset of the hub, a generated or published task."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from data_pipeline.catalogs import catalogs
from data_pipeline.document import TEXT, Columns
from data_pipeline.files import (
    ABOUT_FILES,
    EMPTY,
    HIDDEN,
    TABLE_ENDINGS,
    TEXT_FILE,
    File,
    choose,
    recognize,
)
from data_pipeline.manifest import FILE as MANIFEST
from data_pipeline.sources import (
    BENCHMARKS,
    GETTEXT,
    HUB,
    DocumentSource,
    Files,
    hub_source,
    library_files,
    library_source,
    unreadable_as_user_error,
)
from megakernel.config.errors import UserError

_log = logging.getLogger(__name__)


def source_kind(spec: Sequence[str]) -> str | None:
    """The name of a source that `--source SPEC...` means, such as `stdlib` or `hf`; None for files and directories."""
    name, colon, _ = spec[0].partition(":")
    is_named = list(spec) == ["stdlib"] or name in BENCHMARKS or (colon and name in (HUB, GETTEXT, "task"))
    return name if is_named and len(spec) == 1 else None


def open_source(
    spec: list[str],
    *,
    columns: Columns = TEXT,
    split: str = "train",
    include: Sequence[str] = (),
    seed: int = 0,
    workers: int = 1,
) -> DocumentSource:
    """The source that `--source SPEC...` names.

    `stdlib`, `hf:NAME[:CONFIG]`, `gettext:LANGUAGE[:FOLDER]`, `task:NAME[:key=value,...]`, what `open_benchmark` knows,
    or files and directories.

    `stdlib` with labels: its functions, labeled by package. include: name patterns for files inside directories; empty
    matches all. seed, workers: of generated tasks. Raises UserError for a missing path, a directory without a matching
    file or catalog, labels, pairs or conversations that are not in tables, and as `open_benchmark` does.
    """
    kind = source_kind(spec)
    if columns.chat and kind not in (None, HUB):
        raise _no_conversations(spec[0])
    if kind == "stdlib":
        description = {"kind": "stdlib", "python": ".".join(map(str, sys.version_info[:3]))}
        if columns.label is not None:
            return library_source(columns, description)
        return _file_source([(Path("stdlib"), library_files())], columns, description, by_name=True)
    if kind == HUB:
        return hub_source(spec[0], split, columns)
    if kind is not None:
        if columns.label is not None:
            raise UserError(
                f"--labels {columns.label} is a column of tables, and {spec[0]} is not a table; leave it out"
            )
        if kind == GETTEXT:
            return catalogs(spec[0])
        # Many imports that few commands need.
        from data_pipeline.papers.tasks import open_benchmark
        from data_pipeline.synthetic.source import TaskSource

        if kind == "task":
            return TaskSource.from_spec(spec[0].removeprefix("task:"), seed)
        return open_benchmark(spec[0], seed, workers)
    paths = [Path(path) for path in spec]
    found = [(path, None if path.is_file() else _find_files(path, include)) for path in paths]
    absolute = [str(path.resolve()) for path in paths]
    return _file_source(found, columns, {"kind": "files", "paths": absolute}, by_name=bool(include))


def _no_conversations(source: object) -> UserError:
    return UserError(
        f"--chat reads tables of conversations, and {source} is not a table; give hf:NAME, or files that end in "
        f"{', '.join(TABLE_ENDINGS)}"
    )


def _file_source(
    found: Iterable[tuple[Path, list[Path] | None]],
    columns: Columns,
    description: dict[str, Any],
    by_name: bool,
) -> Files:
    """found: each file, or each directory and its files."""
    files: list[File] = []
    for path, inside in found:
        if inside is not None:
            files += choose(map(_recognize_inside, inside), columns, by_name=by_name)
            continue
        file = _recognize(path)
        if file.format is None and file.what != EMPTY:
            raise UserError(f"--source {path} is not read: it is {file.what}; give files of text or tables")
        files.append(file)
    read = [file for file in files if file.format is not None]
    others = [file for file in files if file.format is None and file.what not in (EMPTY, HIDDEN)]
    if others and all(file.format == TEXT_FILE and ABOUT_FILES.match(file.path.name) for file in read):
        raise UserError(
            f"--source {others[0].path} and {len(others) - 1:,} other files are not read: it is {others[0].what}; no "
            "text is beside them"
        )
    plain = next((file.path for file in read if not file.is_table), None)
    if plain is not None and columns.chat:
        raise _no_conversations(plain)
    option = None if columns.label is None else f"--labels {columns.label}"
    if option is None and len(columns.texts) > 1:
        option = f"--second-text-key {columns.texts[1]}"
    if plain is not None and option is not None:
        raise UserError(
            f"{option} is a column of tables and {plain} is not a table; "
            f"give files that end in {', '.join(TABLE_ENDINGS)}, or choose them with --include"
        )
    return Files(files, columns, description)


def _recognize(path: Path) -> File:
    with unreadable_as_user_error(str(path)):
        return recognize(path)


def _recognize_inside(path: Path) -> File:
    """What is inside a folder, where hidden files and folders are not read."""
    return File(path, what=HIDDEN) if _is_hidden(path) else _recognize(path)


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _find_files(path: Path, include: Sequence[str]) -> list[Path]:
    """The files of a folder, and the hidden files and folders in it. Raises UserError unless one is not hidden."""
    if not path.is_dir():
        raise UserError(f"--source {path} does not exist; give files, a directory, hf:NAME or stdlib alone")
    if is_prepared(path):
        raise UserError(
            f"--source {path} is a prepared folder and no text; list it in data.train, or give its sources"
        )
    files = [
        file
        for file in sorted(_listed(path))
        if (file.is_file() or _is_hidden(file))
        and (not include or any(fnmatch(file.name, pattern) for pattern in include))
    ]
    if all(map(_is_hidden, files)):
        wanted = f" that matches --include {' '.join(include)}" if include else ""
        raise UserError(f"--source {path} holds no file{wanted}; give another directory or pattern")
    return files


def _listed(directory: Path) -> Iterator[Path]:
    """What a directory holds at any depth besides directories, and hidden directories, of which it gives no content.

    Prepared folders and `lost+found` are left out.

    A link to a directory elsewhere is followed, once; one to a part of `directory` leads to nothing new, and one to
    what contains it would lead in a circle. Raises UserError for what cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise UserError(
            f"--source {error.filename} cannot be read: {error.strerror}; make it readable, or name only what is"
        ) from None

    root, followed = directory.resolve(), set[Path]()

    def leads_on(folder: Path) -> bool:
        if _is_hidden(folder) or folder.name == "lost+found":  # the file system's own
            return False
        if is_prepared(folder):
            _log.warning("%s is a prepared folder and is not read", folder)
            return False
        if not folder.is_symlink():
            return True
        target = folder.resolve()
        if target in followed or target.is_relative_to(root) or root.is_relative_to(target):
            return False
        followed.add(target)
        return True

    for parent, folders, names in os.walk(directory, onerror=refuse, followlinks=True):
        inside = [Path(parent, name) for name in sorted(folders)]
        yield from filter(_is_hidden, inside)
        folders[:] = [folder.name for folder in inside if leads_on(folder)]
        yield from (Path(parent, name) for name in names)


def is_prepared(folder: Path) -> bool:
    """Whether `prepare` made a folder, which may be damaged; other programs also write files named manifest.json."""
    parts = (folder / "tokenizer", folder / "train.idx")
    # Unlike methods of Path these raise nothing for a folder that cannot be read.
    return os.path.isfile(folder / MANIFEST) and any(map(os.path.exists, parts))

"""Counts what a process asks of a file system, without strace."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

_AUDITED = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.utime")
_NOT_AUDITED = ("stat", "lstat", "access")
_watched: list[tuple[str, list[str]]] = []
_hooked: list[bool] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched or event not in _AUDITED:
        return
    if event == "os.remove" and arguments[1] != -1:  # as `shutil.rmtree` does: a name in an open folder
        for _, operations in _watched:
            operations.append(f"{event} {arguments[0]}")
    else:
        _note_operation(event, arguments[0])


def _note_operation(operation: str, path: Any) -> None:
    for folder, operations in _watched:
        if isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(folder):
            operations.append(f"{operation} {os.fsdecode(path)}")


@contextmanager
def file_operations(folder: Path) -> Iterator[list[str]]:
    """The operations of this process on files below a folder, while inside; with their paths."""
    if not _hooked:
        # It stays for ever, and does nothing outside. A second one would count everything twice.
        sys.addaudithook(_audit)
        _hooked.append(True)
    entry: tuple[str, list[str]] = (str(folder), [])
    with ExitStack() as stack:
        for name in _NOT_AUDITED:
            call = getattr(os, name)

            def noted(path: Any, *arguments: Any, call: Any = call, name: str = name, **options: Any) -> Any:
                _note_operation(name, path)
                return call(path, *arguments, **options)

            stack.enter_context(patch.object(os, name, noted))
        _watched.append(entry)
        stack.callback(_watched.remove, entry)
        yield entry[1]

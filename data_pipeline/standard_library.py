"""The text that every machine has: the sources of this Python's standard library."""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
"""Those that hold hundreds of functions in every Python from 3.10 on."""

_NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def files() -> list[Path]:
    """Sources without tests: those are half of the bytes, and not installed everywhere."""
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = (file.relative_to(root) for file in root.rglob("*.py"))
    return [root / file for file in sorted(relative) if not _NOT_TEXT.intersection(file.parts)]


def functions() -> dict[str, list[str]]:
    """Columns `text`, the source of a function of PACKAGES, and `package`, the one it is from; no text twice."""
    root = Path(sysconfig.get_paths()["stdlib"])
    packages: dict[str, str] = {}
    for file in files():
        package = file.relative_to(root).parts[0]
        if package in PACKAGES:
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

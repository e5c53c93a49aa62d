"""Error messages, and consoles that can be printed to safely."""

import io
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = "interrupted"
"""The message after Ctrl-C when there is nothing to save."""


def error_lines(text: str) -> list[str]:
    """`megakernel: error: ...` for each line of the text."""
    return [f"megakernel: error: {line}" for line in text.splitlines()]


def print_error(text: str) -> None:
    """Print `error_lines` to stderr."""
    for line in error_lines(text):
        print(line, file=sys.stderr, flush=True)


def console(**options: Any) -> "Console":
    """A Rich console that prints text verbatim: names, paths and foreign messages are not markup."""
    from rich.console import Console

    return Console(markup=False, emoji=False, **options)


class _BestEffortFile(io.FileIO):
    """A console stream that may be full, gone or closed: writing to it never fails."""

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            return super().write(data)
        return memoryview(data).nbytes


def ignore_write_errors(*names: str) -> None:
    """Make prints to these standard streams never fail, neither ours nor a library's."""
    for name in names:
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # not replaced since Python started
            buffer = io.BufferedWriter(_BestEffortFile(stream.fileno(), "wb", closefd=False))
            encoding, errors = stream.encoding, "backslashreplace"
            setattr(sys, name, io.TextIOWrapper(buffer, encoding, errors, line_buffering=True))

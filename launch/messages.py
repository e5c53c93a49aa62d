"""Error messages, and consoles that can be printed to safely."""

import io
import logging
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = "interrupted"
"""The message after Ctrl-C when there is nothing to save."""


_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")
"""Characters with which a text could move the cursor, change colors or titles, or reorder what is shown."""


def printable(text: str) -> str:
    """The text with control characters other than tabs and newlines as `\\x1b`: file names, templates and texts of
    models are foreign, and a terminal would obey them."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def error_lines(text: str) -> list[str]:
    """`megakernel: error: ...` for each line of the text."""
    return [f"megakernel: error: {printable(line)}" for line in text.splitlines()]


def print_error(text: str) -> None:
    """Print `error_lines` to stderr."""
    for line in error_lines(text):
        print(line, file=sys.stderr, flush=True)


def console(**options: Any) -> "Console":
    """A Rich console that prints text verbatim: names, paths and foreign messages are neither markup nor commands."""
    from rich.console import Console

    class Verbatim(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str(printable(text), **options)

    return Verbatim(markup=False, emoji=False, **options)


class _Terminal(io.TextIOWrapper):
    """A terminal that shows control characters instead of obeying them."""

    rich_proxied_file: Any
    """The stream itself, to which Rich's consoles write."""

    def write(self, text: str, /) -> int:
        super().write(printable(text))
        return len(text)


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def show_control_characters() -> None:
    """Make warnings, and prints to a terminal on stdout, harmless, whatever they print."""
    if logging.lastResort is not None:  # what prints warnings of loggers without a handler
        logging.lastResort.setFormatter(_Printable())
    stream = sys.stdout
    if stream is sys.__stdout__ and isinstance(stream, io.TextIOWrapper) and stream.isatty():
        terminal = _Terminal(stream.buffer, stream.encoding, stream.errors, line_buffering=True)
        terminal.rich_proxied_file = stream
        sys.stdout = terminal


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

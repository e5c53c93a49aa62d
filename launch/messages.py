"""What commands say when something is wrong."""

import io
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = "interrupted"
"""What is said of Ctrl-C where there is nothing to save."""


def error_lines(text: str) -> list[str]:
    """`megakernel: error: ...` for each line of the text."""
    return [f"megakernel: error: {line}" for line in text.splitlines()]


def print_error(text: str) -> None:
    """The same, on stderr."""
    show_error_lines(error_lines(text))


def show_error_lines(lines: Iterable[str]) -> None:
    """Lines on stderr, if that can be written: what happened is the exit status's to tell, too."""
    with suppress(OSError):
        for line in lines:
            print(line, file=sys.stderr, flush=True)


def console(**options: Any) -> "Console":
    """A terminal that shows text as it is: names, paths and messages from outside are no markup."""
    from rich.console import Console

    return Console(markup=False, emoji=False, **options)


class _Courtesy(io.FileIO):
    """A console that may be full, gone or closed; whoever writes to it goes on."""

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            return super().write(data)
        return memoryview(data).nbytes


def make_output_a_courtesy() -> None:
    """Let no print of this process fail, neither ours nor a library's: training goes on without a console."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        buffer = io.BufferedWriter(_Courtesy(number, "wb", closefd=False))
        stream = io.TextIOWrapper(buffer, errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)

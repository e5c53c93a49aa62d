"""What commands say when something is wrong."""

import io
import sys
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
    for line in error_lines(text):
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


def make_courtesies(*names: str) -> None:
    """Let no print to these streams of this process fail, neither ours nor a library's."""
    for name in names:
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # as Python has opened it
            buffer = io.BufferedWriter(_Courtesy(stream.fileno(), "wb", closefd=False))
            encoding, errors = stream.encoding, "backslashreplace"
            setattr(sys, name, io.TextIOWrapper(buffer, encoding, errors, line_buffering=True))

"""What commands say when something is wrong."""

import sys

INTERRUPTED = "interrupted"
"""What is said of Ctrl-C where there is nothing to save."""


def error_lines(text: str) -> list[str]:
    """`megakernel: error: ...` for each line of the text."""
    return [f"megakernel: error: {line}" for line in text.splitlines()]


def print_error(text: str) -> None:
    """The same, on stderr."""
    for line in error_lines(text):
        print(line, file=sys.stderr, flush=True)

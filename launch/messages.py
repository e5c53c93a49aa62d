"""What commands say when something is wrong."""

import sys


def print_error(text: str) -> None:
    """`megakernel: error: ...` for each line of the text, on stderr."""
    for line in text.splitlines():
        print(f"megakernel: error: {line}", file=sys.stderr, flush=True)

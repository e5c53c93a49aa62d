"""The command line, and how the processes of a run start."""

import sys
from types import TracebackType


def _on_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C while a command is still being imported, so that nothing of it can catch that."""
    if issubclass(kind, KeyboardInterrupt):
        print("megakernel: error: interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _on_one_line

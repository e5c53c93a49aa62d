"""Files that are there whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file, or leave what was there; it is on the disk when this returns.

    Raises OSError, which names the file.
    """
    staged = path.with_name(path.name + ".partial")
    try:
        with staged.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except OSError as error:
        with suppress(OSError):
            staged.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None

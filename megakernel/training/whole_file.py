"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file, or leave what was there; it is on the disk when this returns."""
    staged = path.with_name(path.name + ".partial")
    with staged.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)

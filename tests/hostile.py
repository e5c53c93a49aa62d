"""Files that run code when they are unpickled: they make a folder that says so."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch


class Harm:
    """Unpickled, it makes `marker`."""

    def __init__(self, marker: Path):
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._marker),)


def plant(file: Path, marker: Path, **pack_keys: Any) -> None:
    """Put the harm in the place of a file of torch.save, `beside` with it."""
    torch.save({**pack_keys, "harm": Harm(marker)}, file)


def plant_pickle(file: Path, marker: Path) -> None:
    """A bare pickle, such as numpy.load takes for an array."""
    file.write_bytes(pickle.dumps(Harm(marker)))


def flip(file: Path, place: float, count: int = 64) -> None:
    """Invert `count` bytes at a share `place` of the file; its size stays."""
    content = bytearray(file.read_bytes())
    start = int(place * (len(content) - count))
    content[start : start + count] = bytes(byte ^ 0xFF for byte in content[start : start + count])
    file.write_bytes(content)

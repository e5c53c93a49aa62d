"""Files that run code when they are unpickled: the code makes a folder, which the tests look for."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch


class Harm:
    """Makes the folder `marker` when it is unpickled."""

    def __init__(self, marker: Path):
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._marker),)


def plant(file: Path, marker: Path, **entries: Any) -> None:
    """Overwrite a file of torch.save with these entries and a `Harm`."""
    torch.save({**entries, "harm": Harm(marker)}, file)


def plant_pickle(file: Path, marker: Path) -> None:
    """Write a bare pickle, which numpy.load would load as an array."""
    file.write_bytes(pickle.dumps(Harm(marker)))


def flip(file: Path, place: float, count: int = 64) -> None:
    """Invert `count` bytes at the fraction `place` of the file; its size does not change."""
    content = bytearray(file.read_bytes())
    start = int(place * (len(content) - count))
    content[start : start + count] = bytes(byte ^ 0xFF for byte in content[start : start + count])
    file.write_bytes(content)

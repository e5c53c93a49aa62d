"""Image: CIFAR-10 in gray, one token per pixel.

The folder is the published one for Python, `cifar-10-batches-py`: pickled dictionaries `data_batch_1` to
`data_batch_5` and `test_batch`, with pixels (images, 3072) uint8, one plane per color, and labels. The last 5,000 of
the 50,000 training images are for validation: the arena (`lra_benchmarks/image/input_pipeline.py`) also takes the last
tenth, but in another library's order of images. Gray is 0.2989 red + 0.587 green + 0.114 blue, as there.
"""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.document import Document
from data_pipeline.papers.published import Published
from data_pipeline.sources import hub_rows
from megakernel.config.errors import UserError

_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
_TRAINING_IMAGES = 45_000
"""Images for training, in order: the last half of the last file is held out."""

_GRAY_WEIGHTS = np.array([0.2989, 0.587, 0.114])


class Image(Published):
    """Images from a folder, or from a dataset of the hub with columns `img` and `label`.

    A document has one character per pixel, its gray value, row by row.
    """

    def __init__(self, where: str):
        """where: folder, or hf:NAME. Raises UserError if a file is missing."""
        files = dict.fromkeys(_BATCHES, "train") | {"test_batch": "test"}
        hub = {"train": "train", "test": "test"}
        super().__init__("lra:image", where, "the folder cifar-10-batches-py", files, hub)

    def _read_file(self, file: Path) -> Iterator[Document]:
        pixels, labels = _read_batch(file)
        held_out = len(labels) // 2 if file.name == _BATCHES[-1] else len(labels)
        for index, (planes, label) in enumerate(zip(pixels, labels)):
            split = None if index < held_out else "validation"
            yield Document((_gray(planes.reshape(3, -1).T),), int(label), split)

    def _read_hub(self, split: str) -> Iterator[Document]:
        for index, row in enumerate(hub_rows(self._where, split, ("img", "label"))):
            held_out = "validation" if split == "train" and index >= _TRAINING_IMAGES else None
            yield Document((_gray(np.asarray(row["img"]).reshape(-1, 3)),), int(row["label"]), held_out)


def _gray(colors: np.ndarray) -> str:
    """The gray values of colors (pixels, 3), one character each."""
    return np.rint(colors @ _GRAY_WEIGHTS).clip(0, 255).astype(np.uint8).tobytes().decode("latin-1")


def _read_batch(file: Path) -> tuple[np.ndarray, list[int]]:
    """Pixels (images, 3072) and classes of a file; UserError if it holds anything else."""
    try:
        with file.open("rb") as stream:
            batch = _ArrayUnpickler(stream, encoding="bytes").load()
        pixels, labels = batch[b"data"], batch[b"labels"]
        if pixels.shape != (len(labels), 3072) or pixels.dtype != np.uint8:
            raise ValueError(f"it has {pixels.shape} numbers")
    # A damaged pickle can raise almost any exception.
    except Exception as error:
        raise UserError(f"{file} is not a batch of CIFAR-10 ({error}); download it again") from error
    return pixels, labels


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles dictionaries of arrays; a file cannot call anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Allow the functions that pickled numpy arrays and Python 3 bytes need; refuse all others."""
        known = {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)

"""Image: CIFAR-10 in gray, a token for each pixel.

From a folder in the published form for Python, `cifar-10-batches-py`: pickled dictionaries `data_batch_1` to
`data_batch_5` and `test_batch`, with pixels (images, 3072) uint8, a plane for each color, and labels. The last 5,000 of
the 50,000 training images are for validation, as in the arena (`lra_benchmarks/image/input_pipeline.py`: the last
tenth), whose order of images is that of another library. Gray is 0.2989 red + 0.587 green + 0.114 blue, as there.
"""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.document import Document
from data_pipeline.published import Published
from data_pipeline.sources import hub_rows
from megakernel.config.errors import UserError

_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
_TRAINED_ON = 45_000
"""Training images, in order: all of the 50,000 but the last half of the last file."""

_WEIGHTS = np.array([0.2989, 0.587, 0.114])


class Image(Published):
    """Images from a folder, or from a dataset of the hub with columns `img` and `label`.

    Documents have one character for the gray value of each pixel, row by row.
    """

    def __init__(self, where: str):
        """where: folder, or hf:NAME. Raises UserError where one of the files is missing."""
        files = dict.fromkeys(_BATCHES, "train") | {"test_batch": "test"}
        hub = {"train": "train", "test": "test"}
        super().__init__("lra:image", where, "the folder cifar-10-batches-py", files, hub)

    def _read_file(self, file: Path) -> Iterator[Document]:
        pixels, labels = _batch(file)
        held_out = len(labels) // 2 if file.name == _BATCHES[-1] else len(labels)
        for place, (planes, label) in enumerate(zip(pixels, labels)):
            split = None if place < held_out else "validation"
            yield Document((_gray(planes.reshape(3, -1).T),), int(label), split)

    def _read_hub(self, split: str) -> Iterator[Document]:
        for place, row in enumerate(hub_rows(self._where, split, ("img", "label"))):
            held_out = "validation" if split == "train" and place >= _TRAINED_ON else None
            yield Document((_gray(np.asarray(row["img"]).reshape(-1, 3)),), int(row["label"]), held_out)


def _gray(colors: np.ndarray) -> str:
    """Gray values of colors (pixels, 3), one character each."""
    return np.rint(colors @ _WEIGHTS).clip(0, 255).astype(np.uint8).tobytes().decode("latin-1")


def _batch(file: Path) -> tuple[np.ndarray, list[int]]:
    """Pixels (images, 3072) and classes of a file; UserError where it holds something else."""
    try:
        with file.open("rb") as stream:
            batch = _Arrays(stream, encoding="bytes").load()
        pixels, labels = batch[b"data"], batch[b"labels"]
        if pixels.shape == (len(labels), 3072) and pixels.dtype == np.uint8:
            return pixels, labels
    # A damaged pickle can raise nearly anything.
    except Exception as error:
        raise UserError(f"{file} is no batch of CIFAR-10 ({error}); download it again") from error
    raise UserError(f"{file} is no batch of CIFAR-10 (it has {pixels.shape} numbers); download it again")


class _Arrays(pickle.Unpickler):
    """Reads dictionaries of arrays, and calls nothing else that a file may name."""

    def find_class(self, module: str, name: str) -> Any:
        """The functions with which numpy pickles arrays, and Python 3 bytes; any other is refused."""
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

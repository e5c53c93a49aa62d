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
from data_pipeline.sources import Source, hub_rows
from megakernel.config.errors import UserError

_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
_TEST = "test_batch"
_TRAINED_ON = 45_000
"""Of the 50,000 training images, in order: all of the files but the last half of the last one."""

_WEIGHTS = np.array([0.2989, 0.587, 0.114])


class Image(Source):
    """Images from a folder, or from a dataset of the hub with columns `img` and `label`."""

    has_splits = True

    def __init__(self, where: str):
        """where: folder, or hf:NAME. Raises UserError where one of the files is missing."""
        super().__init__()
        self._where = where
        if where.startswith("hf:"):
            return
        for name in (*_BATCHES, _TEST):
            if not Path(where, name).is_file():
                raise UserError(
                    f"--source lra:image:{where} has no {name}; give the folder cifar-10-batches-py"
                )

    def describe(self) -> dict[str, Any]:
        """Task and where from."""
        return {"kind": "lra:image", "from": self._where}

    def _read(self) -> Iterator[Document]:
        """One character for the gray value of each pixel, row by row."""
        for colors, label, split in self._from_hub() if self._where.startswith("hf:") else self._from_files():
            yield Document((_gray(colors),), label, split)

    def _from_files(self) -> Iterator[tuple[np.ndarray, int, str]]:
        """Colors (pixels, 3), classes and splits."""
        for name in (*_BATCHES, _TEST):
            pixels, labels = _batch(Path(self._where, name))
            held_out = len(labels) // 2 if name == _BATCHES[-1] else len(labels)
            for place, (planes, label) in enumerate(zip(pixels, labels)):
                training = "train" if place < held_out else "validation"
                yield planes.reshape(3, -1).T, int(label), "test" if name == _TEST else training

    def _from_hub(self) -> Iterator[tuple[np.ndarray, int, str]]:
        for published in ("train", "test"):
            for place, row in enumerate(hub_rows(self._where, published, ("img", "label"))):
                training = "train" if place < _TRAINED_ON else "validation"
                colors = np.asarray(row["img"]).reshape(-1, 3)
                yield colors, int(row["label"]), "test" if published == "test" else training


def _gray(colors: np.ndarray) -> str:
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
        """What numpy writes its arrays with, and Python 3 its bytes."""
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

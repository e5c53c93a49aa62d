"""SPLIT.labels.npy: the class of every example of a split, or the number that a regression predicts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from data_pipeline.document import Label
from data_pipeline.manifest import FileRecord
from megakernel.config.errors import UserError


def write_labels(
    folder: Path, labels: Mapping[str, Sequence[Label | float]], known: Sequence[Label] = ()
) -> tuple[list[Label], dict[str, FileRecord]]:
    """Write each split's labels as numbers of classes; returns the classes in order, and the files' records.

    known: classes that are there whether or not they occur. Labels of type float are written as they are, and there are
    no classes. Raises UserError for fewer than two classes, and for labels of several types side by side.
    """
    values = {label for split in labels.values() for label in split}.union(known)
    if len({type(value) for value in values}) > 1:
        raise UserError("--labels holds numbers and words; write all of them in one way")
    if len(values) < 2:
        raise UserError(f"--labels holds {len(values)} class; give examples of at least two")
    # All of one type: numbers of a regression, which are no classes, or classes.
    classes: list[Label] = sorted(value for value in values if not isinstance(value, float))
    number: dict[Label | float, int] = {label: at for at, label in enumerate(classes)}
    records = {}
    for split, of_split in labels.items():
        if classes:
            np.save(_file(folder, split), np.array([number[label] for label in of_split], dtype=np.int64))
        else:
            np.save(_file(folder, split), np.array(of_split, dtype=np.float32))
        records[split] = FileRecord.of(_file(folder, split))
    return classes, records


def read_labels(folder: Path, split: str) -> np.ndarray:
    """(examples,) int64 numbers of classes, or float32; UserError where the file holds anything else."""
    file = _file(folder, split)
    try:
        labels = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} holds no labels ({error}); prepare the folder again") from None
    if labels.dtype not in (np.int64, np.float32) or labels.ndim != 1:
        raise UserError(f"{file} holds no labels ({labels.dtype} {labels.shape}); prepare the folder again")
    return labels


def _file(folder: Path, split: str) -> Path:
    return folder / f"{split}.labels.npy"

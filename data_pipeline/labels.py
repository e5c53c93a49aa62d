"""SPLIT.labels.npy: the class index of every example of a split, or the number that a regression predicts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from data_pipeline.document import Label
from data_pipeline.manifest import FileRecord
from megakernel.config.errors import UserError


def write_labels(
    folder: Path, labels: Mapping[str, Sequence[Label | float]], all_classes: Sequence[Label] = ()
) -> tuple[list[Label], dict[str, FileRecord]]:
    """Write each split's labels as class indices; returns the classes in order and the files' records.

    all_classes: classes that exist whether or not they occur. Labels of type float are written unchanged, without
    classes. Raises UserError for fewer than two classes and for labels of different types.
    """
    values = {label for split in labels.values() for label in split}.union(all_classes)
    if len({type(value) for value in values}) > 1:
        raise UserError("--labels holds numbers and words; write all of them in one way")
    if len(values) < 2:
        raise UserError(f"--labels holds {len(values)} class; give examples of at least two")
    # All of one type: regression targets (float), or classes.
    classes: list[Label] = sorted(value for value in values if not isinstance(value, float))
    index_of: dict[Label | float, int] = {label: at for at, label in enumerate(classes)}
    records = {}
    for split, split_labels in labels.items():
        file = _file(folder, split)
        if classes:
            np.save(file, np.array([index_of[label] for label in split_labels], dtype=np.int64))
        else:
            np.save(file, np.array(split_labels, dtype=np.float32))
        records[split] = FileRecord.of(file)
    return classes, records


def read_labels(folder: Path, split: str) -> np.ndarray:
    """(examples,) int64 class indices, or float32; UserError if the file holds anything else."""
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

"""DeepSpeed's universal checkpoint format: whole tensors by name, whatever layout wrote them or will read them.

zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt     a parameter and its AdamW state
zero/NAME/fp32.pt                                         a buffer
counters.json                                             what the engine has counted
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .partition import Partition
from .weights_only import load

PARAM, CAT_DIM, PARAM_N_SUB_PARAMS = "param", "cat_dim", "param_n_sub_params"
"""DeepSpeed's names of a file's entries: the tensor, the dimension that tensor ranks share, the parts along it."""

WEIGHT = "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"
STATE = (WEIGHT, *MOMENTS, STEP)
"""What can be known of a tensor: its value, AdamW's moments of it, and how often it was updated."""


class WholeTensors(Protocol):
    """A checkpoint seen as whole tensors. Bytes are read where a tensor is used, not before."""

    @property
    def names(self) -> set[str]:
        """All parameters and buffers."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""

    def read(self, name: str, keys: Iterable[str] = STATE) -> dict[str, Tensor]:
        """Those of `keys` that are known of a tensor."""


class UniversalFolder:
    """A folder in the universal format."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def names(self) -> set[str]:
        """All parameters and buffers."""
        return {path.name for path in (self.folder / "zero").iterdir()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return tuple(self.read(name, [WEIGHT])[WEIGHT].shape)

    def read(self, name: str, keys: Iterable[str] = STATE) -> dict[str, Tensor]:
        """Those of `keys` that are known of a tensor."""
        files = {key: self.folder / "zero" / name / f"{key}.pt" for key in keys}
        entries = {key: load(file) for key, file in files.items() if file.exists()}
        return {key: entry if key == STEP else entry[PARAM] for key, entry in entries.items()}

    def write(self, name: str, state: Mapping[str, Tensor], partition: Partition) -> list[Path]:
        """Write what is known of one tensor, by key; the files. cut: how the layout that it comes from shared it."""
        home = self.folder / "zero" / name
        home.mkdir(parents=True)
        for key, value in state.items():
            # A slice of a flat buffer would take its whole storage to the file.
            tensor = value.clone()
            entry: Any = {
                PARAM: tensor,
                CAT_DIM: partition.dimension or 0,
                PARAM_N_SUB_PARAMS: partition.stride,
            }
            with (home / f"{key}.pt").open("wb") as file:
                torch.save(tensor if key == STEP else entry, file)
        return [home / f"{key}.pt" for key in state]

    @property
    def counters(self) -> dict[str, int]:
        """What the engine has counted, by the name of its attribute."""
        return json.loads((self.folder / "counters.json").read_text())

    def write_counters(self, counters: Mapping[str, int]) -> Path:
        """Write what `counters` gives; the file."""
        file = self.folder / "counters.json"
        file.write_text(json.dumps(dict(counters)))
        return file

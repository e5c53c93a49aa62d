"""DeepSpeed's universal checkpoint format: whole tensors by name, independent of the layout.

zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt     a parameter and its AdamW state
zero/NAME/fp32.pt                                         a buffer
counters.json                                             the engine's counters
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megakernel.parallel.partition import Partition

from .weights_only import load


def partitions(model: nn.Module) -> dict[str, Partition]:
    """Name -> partition of every parameter and buffer that a checkpoint holds.

    Call it before deepspeed.initialize: casting replaces buffers, which lose their attributes.
    """
    tensors = model.state_dict(keep_vars=True)  # Megatron-core's layers add extra state that is no tensor
    return {name: Partition.of(tensor) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


PARAM, CAT_DIM, PARAM_N_SUB_PARAMS = "param", "cat_dim", "param_n_sub_params"
"""DeepSpeed's keys of a file's entries: the tensor, the partitioned dimension, the number of parts along it."""

WEIGHT = "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")
MUON = "muon"
"""Key of a parameter group: whether Muon updates it, whose state is only the first of MOMENTS."""

STEP = "step"
STATE = (WEIGHT, *MOMENTS, STEP)
"""State of a tensor: its value, AdamW's moments, and its number of updates."""


class WholeTensors(Protocol):
    """A checkpoint as whole tensors, which are read lazily."""

    @property
    def names(self) -> set[str]:
        """Names of all parameters and buffers."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self.read(name, [WEIGHT])[WEIGHT].shape)

    def read(self, name: str, keys: Iterable[str] = STATE) -> dict[str, Tensor]:
        """Return the available `keys` of a tensor."""


class UniversalFolder(WholeTensors):
    """A folder in the universal format."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def names(self) -> set[str]:
        """Names of all parameters and buffers."""
        return {path.name for path in (self.folder / "zero").iterdir()}

    def read(self, name: str, keys: Iterable[str] = STATE) -> dict[str, Tensor]:
        """Return the available `keys` of a tensor."""
        files = {key: self.folder / "zero" / name / f"{key}.pt" for key in keys}
        entries = {key: load(file) for key, file in files.items() if file.exists()}
        return {key: entry if key == STEP else entry[PARAM] for key, entry in entries.items()}

    def write(self, name: str, state: Mapping[str, Tensor], partition: Partition) -> list[Path]:
        """Write the state of one tensor; return the files. partition: that of the original layout."""
        home = self.folder / "zero" / name
        home.mkdir(parents=True)
        for key, value in state.items():
            # Saving a slice of a flat buffer would write its whole storage.
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
        """The engine's counters, by attribute name."""
        return json.loads((self.folder / "counters.json").read_text())

    def write_counters(self, counters: Mapping[str, int]) -> Path:
        """Write counters.json; return the file."""
        file = self.folder / "counters.json"
        file.write_text(json.dumps(dict(counters)))
        return file

"""DeepSpeed's universal checkpoint format: whole tensors by name, whatever layout wrote them or will read them.

zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt     a parameter and its AdamW state
zero/NAME/fp32.pt                                         a buffer
counters.json                                             what the engine has counted
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .weights_only import load


@dataclass(frozen=True)
class Partition:
    """What Megatron-core's layers note on their parameters, and ours on what belongs to heads."""

    dimension: int | None
    """Dimension that is cut; None: every rank holds the whole."""

    stride: int = 1
    """Equal parts along the dimension, each of them cut: 2 for the gate and up rows of a SwiGLU projection."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Partition":
        """The cut that the layer which made `tensor` has noted on it."""
        if not getattr(tensor, "tensor_model_parallel", False):
            return cls(None)
        return cls(tensor.partition_dim, tensor.partition_stride)  # type: ignore[attr-defined]

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the shards of all tensor ranks, in order."""
        if self.dimension is None:
            return shards[0]
        parts = zip(*(shard.chunk(self.stride, self.dimension) for shard in shards))
        return torch.cat([shard for part in parts for shard in part], self.dimension)

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """What tensor rank `rank` of `size` holds of the whole tensor."""
        if self.dimension is None:
            return whole
        parts = whole.chunk(self.stride, self.dimension)
        return torch.cat([part.chunk(size, self.dimension)[rank] for part in parts], self.dimension)

    def whole_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """The shape of the tensor that `size` shards of `shape` make."""
        return tuple(n * size if i == self.dimension else n for i, n in enumerate(shape))


def partitions(model: nn.Module) -> dict[str, Partition]:
    """Name -> cut of every parameter and buffer that a checkpoint holds.

    For a model that DeepSpeed has not yet prepared: casting it replaces the buffers, and with them the notes.
    """
    tensors = model.state_dict(keep_vars=True)  # Megatron-core's layers add entries that are no tensors
    return {name: Partition.of(tensor) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


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
        return tuple(self.read(name, [WEIGHT])[WEIGHT].shape)

    def read(self, name: str, keys: Iterable[str] = STATE) -> dict[str, Tensor]:
        """Those of `keys` that are known of a tensor."""


class UniversalFolder(WholeTensors):
    """A folder in the universal format."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def names(self) -> set[str]:
        """All parameters and buffers."""
        return {path.name for path in (self.folder / "zero").iterdir()}

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

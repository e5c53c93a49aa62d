"""DeepSpeed's universal checkpoint format: whole tensors by name, whatever layout wrote them or will read them.

universal/zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt     a parameter and its AdamW state
universal/zero/NAME/fp32.pt                                         a buffer
universal/counters.json                                             what the engine has counted
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from deepspeed.checkpoint.constants import CAT_DIM, PARAM, PARAM_N_SUB_PARAMS
from torch import Tensor, nn

WEIGHT = "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"

_COUNTERS = "counters.json"


@dataclass(frozen=True)
class Cut:
    """How tensor ranks share one tensor, which Megatron-core notes on the tensor itself."""

    dimension: int | None
    """Dimension that is cut; None: every rank holds the whole."""

    stride: int = 1
    """Equal parts along the dimension, each of them cut: 2 for the gate and up rows of a SwiGLU projection."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Cut":
        """The cut that the layer which made `tensor` has noted on it."""
        if not getattr(tensor, "tensor_model_parallel", False):
            return cls(None)
        return cls(tensor.partition_dim, tensor.partition_stride)  # type: ignore[attr-defined]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the pieces of all tensor ranks, in order."""
        if self.dimension is None:
            return pieces[0]
        parts = zip(*(piece.chunk(self.stride, self.dimension) for piece in pieces))
        return torch.cat([shard for part in parts for shard in part], self.dimension)

    def piece(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """What tensor rank `rank` of `size` holds of the whole tensor."""
        if self.dimension is None:
            return whole
        parts = whole.chunk(self.stride, self.dimension)
        return torch.cat([part.chunk(size, self.dimension)[rank] for part in parts], self.dimension)

    def whole_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """The shape of the tensor that `size` pieces of `shape` make."""
        return tuple(n * size if i == self.dimension else n for i, n in enumerate(shape))


def cuts(model: nn.Module) -> dict[str, Cut]:
    """Name -> cut of every parameter and buffer that a checkpoint holds; for a model that is not yet sharded."""
    tensors = model.state_dict(keep_vars=True)  # Megatron-core's layers add entries that are no tensors
    return {name: Cut.of(tensor) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def write_tensor(folder: Path, name: str, state: Mapping[str, Tensor], cut: Cut) -> None:
    """Write what is known of one tensor: WEIGHT, for a parameter also MOMENTS and STEP, whole."""
    home = folder / "zero" / name
    home.mkdir(parents=True)
    for key, value in state.items():
        # A slice of a flat buffer would take its whole storage to the file.
        tensor = value.clone()
        entry = {PARAM: tensor, CAT_DIM: cut.dimension or 0, PARAM_N_SUB_PARAMS: cut.stride}
        with (home / f"{key}.pt").open("wb") as file:
            torch.save(tensor if key == STEP else entry, file)
            file.flush()
            os.fsync(file.fileno())


def read_tensor(folder: Path, name: str, keys: Iterable[str]) -> dict[str, Tensor]:
    """Those of `keys` that are known of a tensor, whole; a file's bytes are read where they are used."""
    files = {key: folder / "zero" / name / f"{key}.pt" for key in keys}
    entries = {key: torch.load(file, mmap=True) for key, file in files.items() if file.exists()}
    return {key: entry if key == STEP else entry[PARAM] for key, entry in entries.items()}


def tensor_names(folder: Path) -> set[str]:
    """Names of all tensors in a universal checkpoint."""
    return {path.name for path in (folder / "zero").iterdir()}


def write_counters(folder: Path, counters: Mapping[str, int]) -> None:
    """Write what the engine has counted, by the name of its attribute."""
    (folder / _COUNTERS).write_text(json.dumps(dict(counters)))


def read_counters(folder: Path) -> dict[str, int]:
    """What `write_counters` wrote."""
    return json.loads((folder / _COUNTERS).read_text())

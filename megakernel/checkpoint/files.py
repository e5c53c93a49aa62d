"""What lies where in the files that DeepSpeed writes, for each ZeRO stage and with or without a pipeline."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .manifest import Checkpoint
from .universal import STATE, STEP, WEIGHT, Partition, WholeTensors
from .weights_only import load

_RECORD = "megakernel"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")

_FLAT = "single_partition_of_fp32_groups", "base_optimizer_state"
_FLAT_ZERO_3 = "fp32_flat_groups", "optimizer_state_dict"
"""Entries of a shard with the flat groups' weights and with their optimizer's state."""


def record(
    model: nn.Module, partitions: Mapping[str, Partition], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """What `CheckpointTensors` needs to know besides DeepSpeed's own entries: client state for save_checkpoint.

    Made before deepspeed.initialize, which replaces the optimizer's parameters.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    return {_RECORD: _told(partitions, order)}


def _told(partitions: Mapping[str, Partition], trained: Sequence[str]) -> dict[str, Any]:
    """trained: in the order of the optimizer."""
    plain = {name: (partition.dimension, partition.stride) for name, partition in partitions.items()}
    return {"cuts": plain, "parameters": list(trained)}


def write_layer(folder: Path, number: int, tensor: int, state: Mapping[str, Tensor]) -> Path:
    """Write what a tensor rank has of a layer, as a pipeline's stage does; the file. state: by name in the layer."""
    file = folder / f"layer_{number:02d}-model_{tensor:02d}-model_states.pt"
    with file.open("wb") as stream:  # whose errors are OSError
        torch.save(dict(state), stream)
    return file


def write_rest(
    folder: Path, tensor: int, partitions: Mapping[str, Partition], counters: Mapping[str, int]
) -> Path:
    """Write what a tensor rank's checkpoint has besides its layers, of a layout without ZeRO; the file.

    There is no optimizer state. partitions: of all tensors. counters: what the engine has counted.
    """
    file = folder / f"mp_rank_{tensor:02d}_model_states.pt"
    counted = {name: counters[name] for name in _COUNTERS}
    with file.open("wb") as stream:
        torch.save({"module": None, **counted, _RECORD: _told(partitions, [])}, stream)
    return file


class CheckpointTensors(WholeTensors):
    """A checkpoint of any layout and ZeRO stage, seen as whole tensors (`universal.WholeTensors`)."""

    def __init__(self, checkpoint: Checkpoint):
        layout = checkpoint.progress.layout
        stages = [
            [_ModelRank(checkpoint, stage, tensor) for tensor in range(layout["tensor"])]
            for stage in range(layout["pipeline"])
        ]
        self._first = stages[0][0]
        # A tied embedding lies on the first and on the last stage: either copy will do.
        self._homes = {name: tensor_ranks for tensor_ranks in stages for name in tensor_ranks[0].partitions}

    @property
    def names(self) -> set[str]:
        """All parameters and buffers."""
        return set(self._homes)

    def partition(self, name: str) -> Partition:
        """How the checkpoint's tensor ranks share a tensor."""
        return self._homes[name][0].partitions[name]

    def read(self, name: str, keys: Iterable[str] = STATE) -> dict[str, Tensor]:
        """Those of `keys` that are known of a tensor."""
        shards = [tensor_rank.read(name, set(keys)) for tensor_rank in self._homes[name]]
        return {
            key: tensor if key == STEP else self.partition(name).join([shard[key] for shard in shards])
            for key, tensor in shards[0].items()
        }

    @property
    def counters(self) -> dict[str, int]:
        """What the engine has counted, by the name of its attribute."""
        return {name: self._first.main[name] for name in _COUNTERS}


class _ModelRank:
    """The files of one model-parallel rank: a tensor rank of a pipeline stage.

    Tensors are mapped, not read: only the bytes of those that are asked for come from the disk.
    """

    def __init__(self, checkpoint: Checkpoint, stage: int, tensor: int):
        layout = checkpoint.progress.layout
        self._folder = checkpoint.folder
        self._zero_stage = layout["zero_stage"]
        self._tensor = tensor
        self._number = stage * layout["tensor"] + tensor

    @cached_property
    def partitions(self) -> dict[str, Partition]:
        """Name -> cut of the tensors this rank has a shard of."""
        return {name: Partition(*partition) for name, partition in self.main[_RECORD]["cuts"].items()}

    def read(self, name: str, keys: set[str]) -> dict[str, Tensor]:
        """This rank's shard. A buffer has a WEIGHT alone, and so has a parameter that was never updated."""
        if name in self._numbers and self._zero_stage > 0:
            return self._joined_shards(name, keys)
        state = {WEIGHT: self._module[name]}
        if name in self._numbers:
            state |= self.main["optimizer"]["state"].get(self._numbers[name], {})
        return {key: tensor for key, tensor in state.items() if key in keys}

    def _joined_shards(self, name: str, keys: set[str]) -> dict[str, Tensor]:
        """A parameter's state from what each data-parallel rank has of it in its flat groups."""
        weights, states = _FLAT_ZERO_3 if self._zero_stage == 3 else _FLAT
        fragments: dict[str, list[Tensor]] = {}
        for shard in self._shards:
            for group, start, numel in self._places_in(shard, name):
                flat = {WEIGHT: shard[weights][group], **shard[states]["state"].get(group, {})}
                for key in keys & flat.keys():
                    fragment = flat[key] if key == STEP else flat[key][start : start + numel]
                    fragments.setdefault(key, []).append(fragment)
        shape = next(shapes[name] for shapes in self.main["param_shapes"] if name in shapes)
        return {
            # ZeRO 3 pads the last shard.
            key: shards[0] if key == STEP else torch.cat(shards)[: shape.numel()].view(shape)
            for key, shards in fragments.items()
        }

    def _places_in(self, shard: dict[str, Any], name: str) -> Iterator[tuple[int, int, int]]:
        """(group, start, numel) of a parameter's fragment in a shard; nothing where the shard has none."""
        if self._zero_stage < 3:
            for group, mapping in enumerate(shard["param_slice_mappings"]):
                if name in mapping:
                    yield group, mapping[name].start, mapping[name].numel
            return
        for group, shapes in enumerate(self.main["param_shapes"]):
            sizes = {other: -(-shape.numel() // len(self._shards)) for other, shape in shapes.items()}
            if name in sizes:
                before = list(sizes)[: list(sizes).index(name)]
                yield group, sum(sizes[other] for other in before), sizes[name]

    @cached_property
    def main(self) -> dict[str, Any]:
        """The file with all but the weights of a pipeline and the optimizer state under ZeRO."""
        first = "zero_pp_rank_0_" if self._zero_stage == 3 else ""
        return load(self._folder / f"{first}mp_rank_{self._number:02d}_model_states.pt")

    @cached_property
    def _shards(self) -> list[dict[str, Any]]:
        """The optimizer state of each data-parallel rank."""
        shards: list[dict[str, Any]] = []
        for rank in count():
            found = list(
                self._folder.glob(f"*zero_pp_rank_{rank}_mp_rank_{self._number:02d}_optim_states.pt")
            )
            if not found:
                return shards
            shards.append(load(found[0])["optimizer_state_dict"])
        raise AssertionError

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Name of a parameter -> its number in the optimizer."""
        return {name: number for number, name in enumerate(self.main[_RECORD]["parameters"])}

    @cached_property
    def _module(self) -> dict[str, Tensor]:
        """The module's state; under ZeRO only its buffers are whole and exact."""
        if self.main["module"] is not None:
            return self.main["module"]
        tensors = {}  # of a pipeline, or of blocks of layers
        for file in sorted(self._folder.glob(f"layer_*-model_{self._tensor:02d}-model_states.pt")):
            layer = int(file.name.split("-")[0].removeprefix("layer_"))
            for key, tensor in load(file).items():
                tensors[f"{layer}.{key}"] = tensor
        # The embedding's file has its number in the list of layers; tied to the head, the module has its name.
        tied = {name: name.split(".", 2)[2] for name in self.partitions if name.startswith("tied_modules.")}
        return tensors | {name: tensors[f"0.{key}"] for name, key in tied.items()}

"""The layout of DeepSpeed's checkpoint files, for each ZeRO stage and with or without a pipeline."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megakernel.parallel.partition import Partition

from .manifest import SavedCheckpoint
from .universal import STATE, STEP, WEIGHT, WholeTensors
from .weights_only import load

_RECORD = "megakernel"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")

_FLAT = "single_partition_of_fp32_groups", "base_optimizer_state"
_FLAT_ZERO_3 = "fp32_flat_groups", "optimizer_state_dict"
"""Entries of a ZeRO shard (stages 1 and 2, stage 3): weights of the flat groups, and their optimizer state."""


def trained_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the optimizer's parameters, in its order.

    Call it before deepspeed.initialize, which replaces the optimizer's parameters.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def client_state(partitions: Mapping[str, Partition], trained: Sequence[str]) -> dict[str, Any]:
    """Client state for DeepSpeed's save_checkpoint, which `CheckpointTensors` needs besides DeepSpeed's own entries.

    trained: as `trained_names` returns them.
    """
    return {_RECORD: _record_entry(partitions, trained)}


def _record_entry(partitions: Mapping[str, Partition], trained: Sequence[str]) -> dict[str, Any]:
    """trained: parameter names in the optimizer's order."""
    plain = {name: astuple(partition) for name, partition in partitions.items()}
    return {"cuts": plain, "parameters": list(trained)}


def write_layer(folder: Path, number: int, tensor: int, state: Mapping[str, Tensor]) -> Path:
    """Write a tensor rank's shard of a layer as a pipeline stage does; return the file. state: by name in the layer."""
    file = folder / f"layer_{number:02d}-model_{tensor:02d}-model_states.pt"
    with file.open("wb") as stream:  # raises OSError; torch.save with a path would raise RuntimeError
        torch.save(dict(state), stream)
    return file


def write_model_states(
    folder: Path, tensor: int, partitions: Mapping[str, Partition], counters: Mapping[str, int]
) -> Path:
    """Write a tensor rank's checkpoint file apart from layers, for a layout without ZeRO; return the file.

    It has no optimizer state. partitions: of all tensors. counters: the engine's, by attribute name.
    """
    file = folder / f"mp_rank_{tensor:02d}_model_states.pt"
    counted = {name: counters[name] for name in _COUNTERS}
    with file.open("wb") as stream:
        torch.save({"module": None, **counted, _RECORD: _record_entry(partitions, [])}, stream)
    return file


class CheckpointTensors(WholeTensors):
    """A checkpoint of any layout and ZeRO stage, seen as whole tensors (`universal.WholeTensors`)."""

    def __init__(self, checkpoint: SavedCheckpoint):
        layout = checkpoint.progress.layout
        stages = [
            [_ModelRank(checkpoint, stage, tensor) for tensor in range(layout["tensor"])]
            for stage in range(layout["pipeline"])
        ]
        self._first = stages[0][0]
        # A tied embedding is on the first and on the last stage, as equal copies.
        self._owners = {name: tensor_ranks for tensor_ranks in stages for name in tensor_ranks[0].partitions}

    @property
    def names(self) -> set[str]:
        """Names of all parameters and buffers."""
        return set(self._owners)

    def partition(self, name: str) -> Partition:
        """The partition of a tensor over the checkpoint's tensor ranks."""
        return self._owners[name][0].partitions[name]

    def read(self, name: str, keys: Iterable[str] = STATE) -> dict[str, Tensor]:
        """Return the available `keys` of a tensor."""
        shards = [tensor_rank.read(name, set(keys)) for tensor_rank in self._owners[name]]
        return {
            key: tensor if key == STEP else self.partition(name).join([shard[key] for shard in shards])
            for key, tensor in shards[0].items()
        }

    @property
    def counters(self) -> dict[str, int]:
        """The engine's counters, by attribute name."""
        return {name: self._first.model_states[name] for name in _COUNTERS}


class _ModelRank:
    """The files of one model-parallel rank, that is one tensor rank of a pipeline stage.

    Files are memory-mapped: only the bytes of requested tensors are read from the disk.
    """

    def __init__(self, checkpoint: SavedCheckpoint, stage: int, tensor: int):
        layout = checkpoint.progress.layout
        self._folder = checkpoint.folder
        self._zero_stage = layout["zero_stage"]
        self._tensor = tensor
        self._model_rank = stage * layout["tensor"] + tensor

    @cached_property
    def partitions(self) -> dict[str, Partition]:
        """Name -> partition of every tensor that this rank has a shard of."""
        return {name: Partition(*partition) for name, partition in self.model_states[_RECORD]["cuts"].items()}

    def read(self, name: str, keys: set[str]) -> dict[str, Tensor]:
        """Return this rank's shard. Buffers and parameters that were never updated have only a WEIGHT."""
        if name in self._optimizer_indices and self._zero_stage > 0:
            return self._joined_shards(name, keys)
        state = {WEIGHT: self._module[name]}
        if name in self._optimizer_indices:
            state |= self.model_states["optimizer"]["state"].get(self._optimizer_indices[name], {})
        return {key: tensor for key, tensor in state.items() if key in keys}

    def _joined_shards(self, name: str, keys: set[str]) -> dict[str, Tensor]:
        """Concatenate a parameter's state from the flat groups of the data-parallel ranks."""
        weights, states = _FLAT_ZERO_3 if self._zero_stage == 3 else _FLAT
        fragments: dict[str, list[Tensor]] = {}
        for shard in self._shards:
            for group, start, numel in self._fragments(shard, name):
                flat = {WEIGHT: shard[weights][group], **shard[states]["state"].get(group, {})}
                for key in keys & flat.keys():
                    fragment = flat[key] if key == STEP else flat[key][start : start + numel]
                    fragments.setdefault(key, []).append(fragment)
        shape = next(shapes[name] for shapes in self.model_states["param_shapes"] if name in shapes)
        return {
            # ZeRO 3 pads the last shard.
            key: shards[0] if key == STEP else torch.cat(shards)[: shape.numel()].view(shape)
            for key, shards in fragments.items()
        }

    def _fragments(self, shard: dict[str, Any], name: str) -> Iterator[tuple[int, int, int]]:
        """Yield (group, start, numel) of a parameter's fragments in a shard."""
        if self._zero_stage < 3:
            for group, mapping in enumerate(shard["param_slice_mappings"]):
                if name in mapping:
                    yield group, mapping[name].start, mapping[name].numel
            return
        for group, shapes in enumerate(self.model_states["param_shapes"]):
            sizes = {other: -(-shape.numel() // len(self._shards)) for other, shape in shapes.items()}
            if name in sizes:
                before = list(sizes)[: list(sizes).index(name)]
                yield group, sum(sizes[other] for other in before), sizes[name]

    @cached_property
    def model_states(self) -> dict[str, Any]:
        """The model_states file: everything except a pipeline's weights and ZeRO's optimizer state."""
        first = "zero_pp_rank_0_" if self._zero_stage == 3 else ""
        return load(self._folder / f"{first}mp_rank_{self._model_rank:02d}_model_states.pt")

    @cached_property
    def _shards(self) -> list[dict[str, Any]]:
        """The optimizer state of each data-parallel rank."""
        shards: list[dict[str, Any]] = []
        for rank in count():
            files = list(
                self._folder.glob(f"*zero_pp_rank_{rank}_mp_rank_{self._model_rank:02d}_optim_states.pt")
            )
            if not files:
                return shards
            shards.append(load(files[0])["optimizer_state_dict"])
        raise AssertionError

    @cached_property
    def _optimizer_indices(self) -> dict[str, int]:
        """Name of a parameter -> its index in the optimizer."""
        return {name: number for number, name in enumerate(self.model_states[_RECORD]["parameters"])}

    @cached_property
    def _module(self) -> dict[str, Tensor]:
        """The module's state dict; with ZeRO only its buffers are whole and unrounded."""
        if self.model_states["module"] is not None:
            return self.model_states["module"]
        tensors = {}  # pipelines and `write_layer` have one file per layer
        for file in sorted(self._folder.glob(f"layer_*-model_{self._tensor:02d}-model_states.pt")):
            layer = int(file.name.split("-")[0].removeprefix("layer_"))
            for key, tensor in load(file).items():
                tensors[f"{layer}.{key}"] = tensor
        # The embedding's file is named after its layer number, 0, even if its parameters are named `tied_modules.*`.
        tied = {name: name.split(".", 2)[2] for name in self.partitions if name.startswith("tied_modules.")}
        return tensors | {name: tensors[f"0.{key}"] for name, key in tied.items()}

"""The layout of DeepSpeed's checkpoint files, for each ZeRO stage and with or without a pipeline."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import astuple
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megakernel.parallel.partition import Partition
from megakernel.parallel.ranks import Ranks

from .fragments import WHOLE, Fragment, Shared
from .manifest import SavedCheckpoint
from .weights_only import load
from .whole_tensors import MOMENTS, STATE, STEP, WEIGHT, WholeTensors
from .zero_shards import ZeroShards

_RECORD = "megakernel"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_TIED = "tied_modules."
"""Prefix of names of a pipeline's tied embedding, whose file is named after its layer number, 0."""


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
    file = _layer_file(folder, number, tensor)
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


def _layer_file(folder: Path, number: int, tensor: int) -> Path:
    return folder / f"layer_{number:02d}-model_{tensor:02d}-model_states.pt"


class CheckpointTensors(WholeTensors):
    """The tensors of a checkpoint of any layout and ZeRO stage.

    Fragments are read straight from DeepSpeed's files, which are memory-mapped, so only what is asked for is read from
    the disk. torch.distributed.checkpoint would read as little from files of its own. It needs to be told ZeRO's
    fragments, too, and could read neither DeepSpeed's files nor those of earlier versions.

    ranks: the ranks that open the checkpoint together; None: only this process.
    Raises UserError, alike on all of them, if a file is damaged.
    """

    def __init__(self, checkpoint: SavedCheckpoint, ranks: Ranks | None = None):
        layout = checkpoint.progress.layout
        ranks = ranks or Ranks()
        shards = ZeroShards(checkpoint, ranks)
        stages = [
            [_ModelRank(checkpoint, shards, stage, tensor) for tensor in range(layout["tensor"])]
            for stage in range(layout["pipeline"])
        ]
        self._first = stages[0][0]
        # A tied embedding is on the first and on the last stage, as equal copies.
        self._owners = ranks.each(
            lambda: {name: tensor_ranks for tensor_ranks in stages for name in tensor_ranks[0].partitions}
        )
        self.bytes_read = 0
        """Bytes of all fragments so far."""

    @property
    def names(self) -> set[str]:
        """Names of all parameters and buffers."""
        return set(self._owners)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        owners = self._owners[name]
        return owners[0].partitions[name].whole_shape(owners[0].stored(name).shape, len(owners))

    def read(self, name: str, keys: Iterable[str] = STATE, fragment: Fragment = WHOLE) -> dict[str, Tensor]:
        """Return the available `keys` of a tensor, a fragment of each but STEP; it may be a view of a mapped file."""
        keys, stored = set(keys), self._owners[name][0].stored(name)
        wanted = [key for key in (WEIGHT, *MOMENTS) if key in keys and key in stored.keys]
        parts = list(self._parts(name, fragment)) if wanted else []
        shape = fragment.shape(self.shape(name))
        state = {key: self._joined(key, shape, parts) for key in wanted}
        if STEP in keys and stored.updates is not None:
            state[STEP] = torch.tensor(stored.updates)
        return state

    def _parts(self, name: str, fragment: Fragment) -> Iterator[tuple["_Piece", list[Shared]]]:
        """The pieces of files that have some of a fragment, with what they have of it."""
        whole, owners = self.shape(name), self._owners[name]
        partition = owners[0].partitions[name]
        # Without a partition all tensor ranks have the same; of equal copies the first is read.
        for rank in [0] if partition.dimension is None else range(0, len(owners), partition.copies):
            shard = Fragment(partition, rank, len(owners))
            spans = [shared.source_span for shared in fragment.shared_with(shard, whole)]
            if not spans:
                continue
            span = range(min(one.start for one in spans), max(one.stop for one in spans))
            for piece in owners[rank].stored(name).pieces(span):
                if shared := fragment.shared_with(shard.narrowed(piece.flat), whole):
                    yield piece, shared

    def _joined(
        self, key: str, shape: tuple[int, ...], parts: Sequence[tuple["_Piece", list[Shared]]]
    ) -> Tensor:
        """A fragment with `shape` of the values of a key; a view of the file if they are in one place there."""
        boxes = [(piece.read(key), shared) for piece, of_piece in parts for shared in of_piece]
        if not boxes:
            return torch.empty(shape)
        self.bytes_read += prod(shape) * boxes[0][0].itemsize
        if len(boxes) == 1 and (view := boxes[0][1].of(boxes[0][0])).is_contiguous():
            return view.view(shape)
        flat = torch.empty(prod(shape), dtype=boxes[0][0].dtype)
        for values, shared in boxes:
            shared.copy(flat, values)
        return flat.view(shape)

    @property
    def counters(self) -> dict[str, int]:
        """The engine's counters, by attribute name."""
        return {name: self._first.model_states[name] for name in _COUNTERS}


class _Piece(NamedTuple):
    """What one file has of a tensor rank's shard."""

    flat: range
    """In the flattened shard."""

    read: Callable[[str], Tensor]
    """Returns its values of a key, with one dimension."""


class _Stored(NamedTuple):
    """A tensor rank's shard of a tensor."""

    shape: tuple[int, ...]
    keys: Set[str]
    """Those of STATE that the files have: buffers and parameters that were never updated have only a WEIGHT."""

    updates: float | None
    """The value of STEP."""

    pieces: Callable[[range], Sequence[_Piece]]
    """Returns those that have some of a range of the flattened shard."""


class _ModelRank:
    """The files of one model-parallel rank, that is one tensor rank of a pipeline stage."""

    def __init__(self, checkpoint: SavedCheckpoint, shards: ZeroShards, stage: int, tensor: int):
        layout = checkpoint.progress.layout
        self._folder = checkpoint.folder
        self._zero_stage = layout["zero_stage"]
        self._shards = shards
        self._tensor = tensor
        self._model_rank = stage * layout["tensor"] + tensor
        self._layers: dict[str, dict[str, Tensor]] = {}

    @cached_property
    def partitions(self) -> dict[str, Partition]:
        """Name -> partition of every tensor that this rank has a shard of."""
        return {name: Partition(*partition) for name, partition in self.model_states[_RECORD]["cuts"].items()}

    def stored(self, name: str) -> _Stored:
        """This rank's shard of a tensor."""
        index = self._optimizer_indices.get(name)
        if index is not None and self._zero_stage > 0:
            return self._in_shards(name)
        weight = self._module_tensor(name)
        state = {} if index is None else self.model_states["optimizer"]["state"].get(index, {})
        values = {WEIGHT: weight, **state}
        piece = _Piece(range(weight.numel()), lambda key: values[key].reshape(-1))
        updates = state.get(STEP)
        updates = None if updates is None else float(updates)
        return _Stored(tuple(weight.shape), values.keys(), updates, lambda span: [piece])

    def _in_shards(self, name: str) -> _Stored:
        """A trained parameter with ZeRO, which is in the optimizer's files."""
        shards, rank = self._shards, self._model_rank
        shapes = self.model_states["param_shapes"]
        group = next(number for number, names in enumerate(shapes) if name in names)
        state = shards.state(rank, group)

        def pieces(span: range) -> list[_Piece]:
            slices = shards.slices(rank, name, span, shapes)
            return [_Piece(part.flat, partial(shards.read, rank, part)) for part in slices]

        return _Stored(tuple(shapes[group][name]), {WEIGHT, *state}, state.get(STEP), pieces)

    @cached_property
    def model_states(self) -> dict[str, Any]:
        """The model_states file: everything except a pipeline's weights and ZeRO's optimizer state."""
        first = "zero_pp_rank_0_" if self._zero_stage == 3 else ""
        return load(self._folder / f"{first}mp_rank_{self._model_rank:02d}_model_states.pt")

    @cached_property
    def _optimizer_indices(self) -> dict[str, int]:
        """Name of a parameter -> its index in the optimizer."""
        return {name: number for number, name in enumerate(self.model_states[_RECORD]["parameters"])}

    def _module_tensor(self, name: str) -> Tensor:
        """A tensor of the module's state dict, where ZeRO leaves only buffers and frozen weights unrounded."""
        module = self.model_states["module"]
        if module is not None:
            return module[name]
        # Pipelines and `write_layer` have one file per layer.
        layer, _, key = name.partition(".")
        if name.startswith(_TIED):
            layer, (_, _, key) = "0", name.split(".", 2)
        if layer not in self._layers:
            self._layers[layer] = load(_layer_file(self._folder, int(layer), self._tensor))
        return self._layers[layer][key]

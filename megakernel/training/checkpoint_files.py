"""What lies where in the files that DeepSpeed writes, for each ZeRO stage and with or without a pipeline."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import Checkpoint
from .universal import MOMENTS, STEP, WEIGHT, Cut

_RECORD = "megakernel"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def record(model: nn.Module, cuts: Mapping[str, Cut], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What `ModelRank` needs to know beside DeepSpeed's own entries: client state for save_checkpoint.

    Made before deepspeed.initialize, which replaces the optimizer's parameters.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    plain = {name: (cut.dimension, cut.stride) for name, cut in cuts.items()}
    return {_RECORD: {"cuts": plain, "parameters": order}}


class ModelRank:
    """The files of one model-parallel rank (a tensor rank of a pipeline stage) in a checkpoint.

    Tensors are mapped, not read: only the bytes of those that are asked for come from the disk.
    """

    def __init__(self, checkpoint: Checkpoint, stage: int, tensor: int):
        layout = checkpoint.progress.layout
        self._folder = checkpoint.folder
        self._zero_stage = layout["zero_stage"]
        self._pipelined = layout["pipeline"] > 1
        self._tensor = tensor
        self._number = stage * layout["tensor"] + tensor

    @cached_property
    def cuts(self) -> dict[str, Cut]:
        """Name -> cut of the tensors this rank has a piece of."""
        return {name: Cut(*cut) for name, cut in self._main[_RECORD]["cuts"].items()}

    @property
    def counters(self) -> dict[str, int]:
        """What the engine has counted, by the name of its attribute."""
        return {name: self._main[name] for name in _COUNTERS}

    def state(self, name: str) -> dict[str, Tensor]:
        """This rank's piece of a tensor: WEIGHT, and MOMENTS and STEP of a parameter that was ever updated."""
        if name not in self._places:
            return {WEIGHT: self._module[name]}
        if self._zero_stage == 0:
            state = self._main["optimizer"]["state"].get(self._places[name], {})
            return {
                WEIGHT: self._module[name],
                **{key: state[key] for key in (*MOMENTS, STEP) if key in state},
            }
        return self._joined_shards(name)

    def _joined_shards(self, name: str) -> dict[str, Tensor]:
        """A parameter's state from what each data-parallel rank has of it in its flat groups."""
        weights, states = (
            ("fp32_flat_groups", "optimizer_state_dict")
            if self._zero_stage == 3
            else ("single_partition_of_fp32_groups", "base_optimizer_state")
        )
        fragments: dict[str, list[Tensor]] = {}
        joined: dict[str, Tensor] = {}
        for shard in self._shards:
            for group, start, numel in self._places_in(shard, name):
                state = shard[states]["state"].get(group, {})
                flat = {WEIGHT: shard[weights][group], **{key: state[key] for key in MOMENTS if key in state}}
                for key, tensor in flat.items():
                    fragments.setdefault(key, []).append(tensor[start : start + numel])
                if STEP in state:
                    joined[STEP] = state[STEP]
        shape = next(shapes[name] for shapes in self._main["param_shapes"] if name in shapes)
        for key, pieces in fragments.items():
            joined[key] = torch.cat(pieces)[: shape.numel()].view(shape)  # ZeRO 3 pads the last shard
        return joined

    def _places_in(self, shard: dict[str, Any], name: str) -> Iterator[tuple[int, int, int]]:
        """(group, start, numel) of a parameter's fragment in a shard; nothing where the shard has none."""
        if self._zero_stage < 3:
            for group, mapping in enumerate(shard["param_slice_mappings"]):
                if name in mapping:
                    yield group, mapping[name].start, mapping[name].numel
            return
        for group, shapes in enumerate(self._main["param_shapes"]):
            sizes = {other: -(-shape.numel() // len(self._shards)) for other, shape in shapes.items()}
            if name in sizes:
                before = list(sizes)[: list(sizes).index(name)]
                yield group, sum(sizes[other] for other in before), sizes[name]

    @cached_property
    def _main(self) -> dict[str, Any]:
        first = "zero_pp_rank_0_" if self._zero_stage == 3 else ""
        return _map(self._folder / f"{first}mp_rank_{self._number:02d}_model_states.pt")

    @cached_property
    def _shards(self) -> list[dict[str, Any]]:
        """The optimizer state of each data-parallel rank."""
        shards = []
        for rank in count():
            found = list(
                self._folder.glob(f"*zero_pp_rank_{rank}_mp_rank_{self._number:02d}_optim_states.pt")
            )
            if not found:
                return shards
            shards.append(_map(found[0])["optimizer_state_dict"])
        raise AssertionError

    @cached_property
    def _places(self) -> dict[str, int]:
        """Name of a parameter -> its number in the optimizer."""
        return {name: number for number, name in enumerate(self._main[_RECORD]["parameters"])}

    @cached_property
    def _module(self) -> dict[str, Tensor]:
        """The module's state; under ZeRO only its buffers are whole and exact."""
        if not self._pipelined:
            return self._main["module"]
        tensors = {}
        for file in sorted(self._folder.glob(f"layer_*-model_{self._tensor:02d}-model_states.pt")):
            layer = int(file.name.split("-")[0].removeprefix("layer_"))
            for key, tensor in _map(file).items():
                tensors[f"{layer}.{key}"] = tensor
        # The embedding's file has its number in the list of layers; tied to the head, the module has its name.
        tied = {name: name.split(".", 2)[2] for name in self.cuts if name.startswith("tied_modules.")}
        return tensors | {name: tensors[f"0.{key}"] for name, key in tied.items()}


def _map(file: Path) -> dict[str, Any]:
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)

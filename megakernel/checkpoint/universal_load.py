"""Whole tensors into a DeepSpeed engine, whatever its layout and ZeRO stage."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
from torch import Tensor, nn

from megakernel.parallel import Mesh
from megakernel.parallel.axis import Axis

from .universal import MOMENTS, STEP, WEIGHT, Partition, WholeTensors


def with_moments(module: nn.Module, source: WholeTensors, names: set[str]) -> dict[str, int]:
    """Those of this process's trained parameters among `names` of which the source has moments -> their updates."""
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    states = {name: source.read(name, [STEP]) for name in trained if name in names}
    return {name: int(state[STEP]) for name, state in states.items() if state}


def load_moments(
    engine: Any,
    partitions: Mapping[str, Partition],
    tp: Axis,
    source: WholeTensors,
    names: Iterable[str],
    updates: int,
) -> None:
    """Put AdamW's moments of this process's parameters `names` in place, after so many updates.

    Those of all others begin at 0, with the same count: flat groups have one. engine: from deepspeed.initialize, before
    its first update.
    """
    _begin_state(engine, updates)
    optimizer = engine.basic_optimizer
    parameters = dict(engine.module.named_parameters())
    for name in names:
        parameter, moments = parameters[name], source.read(name, MOMENTS)
        for key in MOMENTS:
            moment = partitions[name].shard(moments[key], tp.rank, tp.size).to(parameter.device)
            if parameter in optimizer.state:  # without ZeRO
                optimizer.state[parameter][key].copy_(moment)
            else:
                safe_set_full_optimizer_state(parameter, moment, key)


def load_weights(
    module: nn.Module, partitions: Mapping[str, Partition], tp: Axis, source: WholeTensors, names: set[str]
) -> None:
    """Put those of this process's parameters and buffers in place that are among `names`.

    module: with or without DeepSpeed around it; float32 master weights are set too.
    """
    for name, target in _tensors(module):
        if name not in names:
            continue
        whole = source.read(name, [WEIGHT])[WEIGHT]
        value = partitions[name].shard(whole, tp.rank, tp.size).to(target.device)
        # Every rank writes the same; under ZeRO 3 the first one's copy is what is sharded again.
        with deepspeed.zero.GatheredParameters([target], modifier_rank=0):
            target.data.copy_(value)
        safe_set_full_fp32_param(target, value.float())


def _begin_state(engine: Any, step: int) -> None:
    """AdamW's state after `step` updates, still of zeros, in every tensor that the optimizer steps.

    torch makes it in the first update, and DeepSpeed links it to the parameters after that one.
    """
    wrapper, optimizer = engine.optimizer, engine.basic_optimizer
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for tensor in getattr(
        wrapper, "fp32_partitioned_groups_flat", stepped
    ):  # ZeRO 3 keeps them out of the groups
        moments = {key: torch.zeros_like(tensor) for key in MOMENTS}
        optimizer.state[tensor] = {STEP: torch.tensor(float(step)), **moments}
    if hasattr(wrapper, "_lazy_init_hp_params_optimizer_state"):  # ZeRO 1 and 2, bfloat16
        wrapper._lazy_init_hp_params_optimizer_state()


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@dataclass(frozen=True)
class Comparison:
    """What a checkpoint's weights and a model have in common."""

    common: set[str]
    """Tensors of equal shape on both sides."""

    missing: list[str]
    """Tensors of the model that the checkpoint has not."""

    unexpected: list[str]
    """Tensors of the checkpoint that the model has not."""

    misshapen: list[str]
    """One line for each tensor whose shapes differ."""


def compare(shapes: Mapping[str, tuple[int, ...]], source: WholeTensors) -> Comparison:
    """Compare the whole model's tensors, name -> whole shape, with those of a checkpoint."""
    there = source.names
    found = {name: source.shape(name) for name in there & shapes.keys()}
    return Comparison(
        common={name for name, shape in found.items() if shape == shapes[name]},
        missing=sorted(shapes.keys() - there),
        unexpected=sorted(there - shapes.keys()),
        misshapen=[
            f"{name} is {shape} in the checkpoint and {shapes[name]} in the model"
            for name, shape in sorted(found.items())
            if shape != shapes[name]
        ],
    )


def gathered_shapes(
    module: nn.Module, partitions: Mapping[str, Partition], mesh: Mesh
) -> dict[str, tuple[int, ...]]:
    """Name -> shape over all tensor ranks, of the parameters and buffers of all stages; called on all ranks."""
    own = whole_shapes(module, partitions, mesh.tp)
    return {name: shape for part in mesh.gather_objects(own) for name, shape in part.items()}


def whole_shapes(
    module: nn.Module, partitions: Mapping[str, Partition], tp: Axis
) -> dict[str, tuple[int, ...]]:
    """Name -> shape over all tensor ranks, of this process's parameters and buffers."""
    return {
        # ZeRO 3 leaves an empty tensor behind.
        name: partitions[name].whole_shape(getattr(tensor, "ds_shape", tensor.shape), tp.size)
        for name, tensor in _tensors(module)
        if name in partitions  # buffers that no checkpoint holds are not
    }

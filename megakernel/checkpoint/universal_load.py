"""Loading of whole tensors into a DeepSpeed engine of any layout and ZeRO stage."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
from torch import Tensor, nn

from megakernel.parallel import Mesh
from megakernel.parallel.axis import Axis
from megakernel.parallel.partition import Partition

from .universal import MOMENTS, MUON, STEP, WEIGHT, WholeTensors


def stored_updates(module: nn.Module, source: WholeTensors, names: set[str]) -> dict[str, int]:
    """This process's trained parameters among `names` that have moments in the source -> their number of updates."""
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
    """Load the moments of this process's parameters `names`, of the same optimizer, and set the number of updates.

    The moments of all other parameters are 0 and have the same number of updates, because a flat group has only one.
    engine: from deepspeed.initialize, before its first update.
    """
    _create_optimizer_state(engine, updates)
    optimizer = engine.basic_optimizer
    parameters = dict(engine.module.named_parameters())
    for name in names:
        parameter, moments = parameters[name], source.read(name, MOMENTS)
        for key in moments:
            moment = partitions[name].shard(moments[key], tp.rank, tp.size).to(parameter.device)
            if parameter in optimizer.state:  # without ZeRO
                optimizer.state[parameter][key].copy_(moment)
            else:
                safe_set_full_optimizer_state(parameter, moment, key)


def load_weights(
    module: nn.Module, partitions: Mapping[str, Partition], tp: Axis, source: WholeTensors, names: set[str]
) -> None:
    """Load this process's parameters and buffers that are among `names`.

    module: before or after deepspeed.initialize; float32 master weights are also set.
    """
    for name, target in _tensors(module):
        if name not in names:
            continue
        whole = source.read(name, [WEIGHT])[WEIGHT]
        value = partitions[name].shard(whole, tp.rank, tp.size).to(target.device)
        # Every rank writes the same values; ZeRO 3 re-shards those of rank 0.
        with deepspeed.zero.GatheredParameters([target], modifier_rank=0):
            target.data.copy_(value)
        safe_set_full_fp32_param(target, value.float())


def _create_optimizer_state(engine: Any, step: int) -> None:
    """Create AdamW's or Muon's state, with moments of 0 and `step` updates, for every tensor that the optimizer steps.

    Otherwise torch creates it in the first update, and DeepSpeed links it to the parameters only after that.
    """
    wrapper, optimizer = engine.optimizer, engine.basic_optimizer
    stepped = {
        parameter: MOMENTS[:1] if group.get(MUON) else MOMENTS
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    # ZeRO 3 keeps its flat tensors outside of the parameter groups.
    for tensor in getattr(wrapper, "fp32_partitioned_groups_flat", stepped):
        moments = {key: torch.zeros_like(tensor) for key in stepped.get(tensor, MOMENTS)}
        optimizer.state[tensor] = {STEP: torch.tensor(float(step), device=tensor.device), **moments}
    if hasattr(wrapper, "_lazy_init_hp_params_optimizer_state"):  # ZeRO 1 and 2, bfloat16
        wrapper._lazy_init_hp_params_optimizer_state()


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@dataclass(frozen=True)
class Comparison:
    """Comparison of a checkpoint's tensors with a model's."""

    common: set[str]
    """Tensors of equal shape on both sides."""

    missing: list[str]
    """Tensors of the model that the checkpoint lacks."""

    unexpected: list[str]
    """Tensors of the checkpoint that the model lacks."""

    misshapen: list[str]
    """A message for each tensor whose shapes differ."""


def compare(shapes: Mapping[str, tuple[int, ...]], source: WholeTensors) -> Comparison:
    """Compare a model's tensors, name -> whole shape, with a checkpoint's."""
    stored_names = source.names
    stored_shapes = {name: source.shape(name) for name in stored_names & shapes.keys()}
    return Comparison(
        common={name for name, shape in stored_shapes.items() if shape == shapes[name]},
        missing=sorted(shapes.keys() - stored_names),
        unexpected=sorted(stored_names - shapes.keys()),
        misshapen=[
            f"{name} is {shape} in the checkpoint and {shapes[name]} in the model"
            for name, shape in sorted(stored_shapes.items())
            if shape != shapes[name]
        ],
    )


def gathered_shapes(
    module: nn.Module, partitions: Mapping[str, Partition], mesh: Mesh
) -> dict[str, tuple[int, ...]]:
    """Name -> whole shape of the parameters and buffers of all pipeline stages; called on all ranks."""
    local = whole_shapes(module, partitions, mesh.tp)
    return {name: shape for shapes in mesh.gather_objects(local) for name, shape in shapes.items()}


def whole_shapes(
    module: nn.Module, partitions: Mapping[str, Partition], tp: Axis
) -> dict[str, tuple[int, ...]]:
    """Name -> whole shape of this process's parameters and buffers."""
    return {
        # With ZeRO 3 the tensor itself is empty.
        name: partitions[name].whole_shape(getattr(tensor, "ds_shape", tensor.shape), tp.size)
        for name, tensor in _tensors(module)
        if name in partitions  # non-persistent buffers are not
    }

"""Loading of a checkpoint's tensors into a DeepSpeed engine of any layout and ZeRO stage.

Each rank reads what it holds: with ZeRO, the range of a parameter whose float32 weights and moments its optimizer has;
of all other tensors, its tensor rank's shard. If ranks hold the same shard of a parameter, one of them reads it. Then
the ranks exchange what they have read.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state
from torch import Tensor, nn

from megakernel.parallel import Mesh
from megakernel.parallel.axis import Axis
from megakernel.parallel.partition import Partition

from .fragments import Fragment
from .whole_tensors import MOMENTS, MUON, STEP, WEIGHT, WholeTensors


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
    gradient: Axis,
) -> None:
    """Load the moments of this process's parameters `names`, of the same optimizer, and set the number of updates.

    The moments of all other parameters are 0 and have the same number of updates, because a flat group has only one.
    `exchange_moments` must follow. engine: from deepspeed.initialize, before its first update. gradient: the ranks with
    the same shards.
    """
    _create_optimizer_state(engine, updates)
    state = engine.basic_optimizer.state
    parameters, readers = dict(engine.module.named_parameters()), _readers(engine.module, gradient)
    for name in names:
        parameter, fragment = parameters[name], _held(parameters[name], partitions[name], tp)
        if fragment is None or readers.get(name, gradient.rank) != gradient.rank:
            continue
        for key, moment in source.read(name, MOMENTS, fragment).items():
            if _is_zero3(parameter):
                safe_set_local_optimizer_state(parameter, _padded(parameter, moment), key)
            elif _has_mapping(parameter):
                parameter._hp_mapping.get_hp_fragment(key).copy_(moment)
            else:
                state[parameter][key].copy_(moment)


@torch.no_grad()
def load_weights(
    module: nn.Module,
    partitions: Mapping[str, Partition],
    tp: Axis,
    source: WholeTensors,
    names: set[str],
    gradient: Axis | None = None,
) -> None:
    """Load this process's parameters and buffers that are among `names`.

    gradient: the ranks with the same shards, on all of which `exchange_weights` must follow; None: this process reads
    all of a module without ZeRO.
    """
    readers = {} if gradient is None else _readers(module, gradient)
    for name, target in _tensors(module):
        if name not in names or (fragment := _held(target, partitions[name], tp)) is None:
            continue
        if gradient is not None and readers.get(name, gradient.rank) != gradient.rank:
            continue
        value = source.read(name, [WEIGHT], fragment)[WEIGHT]
        if not _is_zero3(target):
            (target._hp_mapping.hp_fragment if _has_mapping(target) else target.data).copy_(value)
            continue
        if target.ds_tensor.status is PartitionedParamStatus.AVAILABLE:
            target.ds_tensor.data[: len(value)].copy_(value)
        else:  # on NVMe: DeepSpeed's swapper takes whole weights
            whole = source.read(name, [WEIGHT], Fragment(partitions[name], tp.rank, tp.size))[WEIGHT]
            with deepspeed.zero.GatheredParameters([target], modifier_rank=0):
                target.data.copy_(whole)
        safe_set_local_fp32_param(target, _padded(target, value.float()))


def exchange_weights(engine: Any, names: set[str], gradient: Axis) -> None:
    """Give all ranks the weights `names` that each has set in `load_weights`, in the dtype of training.

    A collective. engine: from deepspeed.initialize.
    """
    parameters = dict(engine.module.named_parameters())
    for name, reader in _readers(engine.module, gradient).items():
        if name in names:
            _send(parameters[name].data, reader, gradient)
    wrapper = engine.optimizer
    if engine.zero_optimization_partition_weights():
        # Small parameters are kept whole.
        wrapper.checkpoint_event_prologue()
        wrapper.checkpoint_event_epilogue()
    elif hasattr(wrapper, "update_lp_params"):
        wrapper.update_lp_params()


def exchange_moments(engine: Any, names: Iterable[str], gradient: Axis) -> None:
    """Give all ranks the moments of `names` that each has set in `load_moments`; a collective."""
    parameters, readers = dict(engine.module.named_parameters()), _readers(engine.module, gradient)
    for name in names:
        if name in readers:
            state = engine.basic_optimizer.state[parameters[name]]
            for key in MOMENTS:
                if key in state:
                    _send(state[key], readers[name], gradient)


def _readers(module: nn.Module, gradient: Axis) -> dict[str, int]:
    """Parameters that all ranks of `gradient` hold whole -> the one of them that reads it."""
    names = [name for name, one in module.named_parameters() if not _is_zero3(one) and not _has_mapping(one)]
    return {name: number % gradient.size for number, name in enumerate(names)}


def _send(tensor: Tensor, reader: int, gradient: Axis) -> None:
    if gradient.size > 1:
        dist.broadcast(tensor, group=gradient.group, group_src=reader)


def _held(tensor: Any, partition: Partition, tp: Axis) -> Fragment | None:
    """The fragment of a tensor that this rank holds and, if it is trained, updates; None: nothing."""
    shard = Fragment(partition, tp.rank, tp.size)
    if _is_zero3(tensor):
        size, rank = tensor.ds_tensor.ds_numel, dist.get_rank(tensor.ds_process_group)
        return shard.narrowed(
            range(min(rank * size, tensor.ds_numel), min((rank + 1) * size, tensor.ds_numel))
        )
    if _has_mapping(tensor):
        if tensor._hp_mapping is None:
            return None
        address = tensor._hp_mapping.lp_fragment_address
        return shard.narrowed(range(address.start, address.start + address.numel))
    return shard


def _is_zero3(tensor: Any) -> bool:
    return hasattr(tensor, "ds_tensor")


def _has_mapping(tensor: Any) -> bool:
    """Whether ZeRO 1 or 2 updates a parameter; `_hp_mapping` has what this rank updates of it, None for nothing."""
    return hasattr(tensor, "_hp_mapping")


def _padded(parameter: Any, part: Tensor) -> Tensor:
    """A rank's part of a parameter under ZeRO 3, as long as that of every other rank."""
    return F.pad(part, (0, parameter.ds_tensor.ds_numel - len(part)))


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


def _tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
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

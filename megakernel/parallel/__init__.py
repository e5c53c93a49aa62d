"""Parallelism: the mesh over Megatron-core's groups, context-parallel exchange, sharded heads, devices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megakernel.parallel.axis import OneProcess
    from megakernel.parallel.device import prepare_device
    from megakernel.parallel.mesh import Mesh
    from megakernel.parallel.tensor import all_reduce, mark_head_parameters, replicated


_MODULES = {
    "Mesh": "mesh",
    "OneProcess": "axis",
    "all_reduce": "tensor",
    "mark_head_parameters": "tensor",
    "prepare_device": "device",
    "replicated": "tensor",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: a process determines its rank and device before it loads Megatron-core and DeepSpeed.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

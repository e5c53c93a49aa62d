"""Processes: the mesh over Megatron-core's groups, sequence exchange, sharded heads, the device beneath."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megakernel.parallel.axis import OneProcess
    from megakernel.parallel.device import prepare_device
    from megakernel.parallel.mesh import Mesh
    from megakernel.parallel.tensor import mark_head_parameters, replicated, total


_HOMES = {
    "Mesh": "mesh",
    "OneProcess": "axis",
    "mark_head_parameters": "tensor",
    "prepare_device": "device",
    "replicated": "tensor",
    "total": "tensor",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: a process finds its place and its device before it loads the libraries.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

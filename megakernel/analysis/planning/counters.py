"""What a real run sends and holds: counters that predictions are compared with."""

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class WireCounter(TorchDispatchMode):
    """Bytes that this process hands to collectives while the mode is on, by process group and operation.

    Counted is the tensor that goes in: what this process contributes, whichever way the backend sends it on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count a collective and run it; run everything else."""
        if func.namespace == "c10d":
            operation = func._schema.name.removeprefix("c10d::").strip("_")
            group = next((_group_name(arg) for arg in args if isinstance(arg, torch.ScriptObject)), "")
            sent = _handed_in(operation, args)
            self.bytes[group, operation] += sent
            self.calls[group, operation] += 1
        return func(*args, **(kwargs or {}))


def _group_name(group: Any) -> str:
    try:
        return ProcessGroup.unbox(group).group_name
    except (RuntimeError, TypeError):  # reduce operations are script objects, too
        return ""


def _handed_in(operation: str, args: tuple[Any, ...]) -> int:
    # Collectives that have an output name it first.
    has_output = operation in (
        "allgather",
        "allgather_base",
        "reduce_scatter",
        "reduce_scatter_base",
        "alltoall",
        "alltoall_base",
    )
    tensors = args[1] if has_output else args[0]
    return sum(x.nbytes for x in tree_iter(tensors) if isinstance(x, Tensor))


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors made while the mode is on that are still alive, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation and count the storages that are new in what it returns."""
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, Tensor):
                self.add(x)
        return out

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is not counted yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

"""Counts bytes of tensors and messages of collectives while code runs on real or fake tensors.

Fake tensors have shapes and no contents, so that a layer of any size runs in a second without memory. Integers stay
real, as attention branches on the positions of documents; it does not branch on masks of pairs of tokens.
"""

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

aten, c10d = torch.ops.aten, torch.ops.c10d

FACTORIES = frozenset((aten.empty.memory_format, aten.zeros.default, aten.ones.default, aten.full.default))
RANGES = frozenset((aten.arange.default, aten.arange.start, aten.arange.start_step))

MANY_PAIRS = 2**22
"""A comparison of integers with more elements is a mask of pairs and has no contents; nor have so many integers that
are computed with: what each token of a head chose."""


class Message(NamedTuple):
    """A kind of message."""

    group: str
    """Name of its process group."""

    operation: str
    """Name in torch.distributed."""


class Ledger(TorchDispatchMode):
    """Counts while it is active; of a collective it counts this process's input.

    It counts the bytes that torch's own `MemTracker` counts (a test compares them), which cannot be used here: it needs
    `FakeTensorMode`, whose integers have no contents either.
    """

    def __init__(self, contents: bool = True) -> None:
        """contents: whether tensors are real; otherwise floating-point tensors have no contents."""
        super().__init__()
        self.live_bytes = 0
        """Bytes of all live tensors that were made or added here."""
        self.peak = 0
        """Most `live_bytes` so far; callers may reset it."""
        self.sent: Counter[Message] = Counter()
        """Bytes by message."""
        self.operations = 0
        self._with_contents = contents
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        """Address of a live storage -> its bytes, and a reference with a callback for when it is freed."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would make torch import its compiler

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation, and count the tensors that it makes and the bytes that it sends."""
        kwargs = kwargs or {}
        self.operations += 1
        if func.namespace == "c10d":
            self._count_message(func, args)
        out = func(*args, **kwargs) if self._with_contents else run_shape_only(func, args, kwargs)
        for x in (out,) if isinstance(out, Tensor) else tree_iter(out):
            if isinstance(x, Tensor):
                self.add(x)
        return out

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage unless it is counted already."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._live:
            reference = weakref.ref(storage, lambda _: self._freed(address))
            self._live[address] = storage.nbytes(), reference
            self.live_bytes += storage.nbytes()
            self.peak = max(self.peak, self.live_bytes)

    def _freed(self, address: int) -> None:
        size, _ = self._live.pop(address)
        self.live_bytes -= size

    def _count_message(self, func: Any, args: tuple[Any, ...]) -> None:
        operation = func._schema.name.removeprefix("c10d::").strip("_")
        if operation == "recv":
            return
        group = next((_group_name(arg) for arg in args if isinstance(arg, torch.ScriptObject)), "")
        # Collectives with an output argument have it first.
        tensors = args[1] if operation in WITH_OUTPUT else args[0]
        size = sum(x.nbytes for x in tree_iter(tensors) if isinstance(x, Tensor))
        self.sent[Message(group, OPERATIONS.get(operation, operation))] += size


class ShapeOnly(Tensor):
    """A CPU tensor with a shape and no contents."""

    meta: Tensor
    """The same tensor on torch's meta device; its storage stands for this one's."""

    @staticmethod
    def __new__(cls, meta: Tensor) -> "ShapeOnly":
        """Wrap a meta tensor."""
        place = (meta.shape, meta.stride(), meta.storage_offset())
        tensor = Tensor._make_wrapper_subclass(cls, *place, dtype=meta.dtype, device=torch.device("cpu"))
        tensor.meta = meta
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def untyped_storage(self) -> torch.UntypedStorage:
        """The same for tensors that share memory."""
        return self.meta.untyped_storage()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func, types, args=(), kwargs=None
    ):
        """Run the operation when no ledger is active."""
        return run_shape_only(func, args, kwargs or {})


def run_shape_only(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operation on fake floating-point tensors and real integer tensors."""
    if func is aten._local_scalar_dense.default and isinstance(args[0], ShapeOnly):
        return 0  # a check for bad values finds none, and a mask is false
    if func is aten.index.Tensor:  # a real mask gives the size of the result
        args = (args[0], [y for x in args[1] for y in _mask_indices(x)])
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
    real = (not isinstance(x, ShapeOnly) and not x.is_floating_point() for x in tensors)
    has_contents = not _makes_mask(tensors) and max((x.numel() for x in tensors), default=0) <= MANY_PAIRS
    is_real = all(real) and has_contents if tensors else _makes_integers(func, args, kwargs)
    if is_real:
        out = func(*args, **kwargs)
        if func is c10d._allgather_base_.default:
            _set_positions(*args[:2])
        return tree_map_only(Tensor, lambda x: ShapeOnly(x.to("meta")) if x.is_floating_point() else x, out)
    if _overwrites_first(func) and isinstance(args[0], ShapeOnly):
        return args[0]
    key = (func, _signature(args), _signature(tuple(kwargs.items()))) if _returns_no_alias(func) else None
    if key in _SHAPES:
        sizes, strides, dtype = _SHAPES[key]
        return ShapeOnly(torch.empty_strided(sizes, strides, dtype=dtype, device="meta"))
    by_meta = {id(x.meta): x for x in tensors if isinstance(x, ShapeOnly)}
    args, on_meta = tree_map_only(Tensor, _meta, (args, kwargs))
    if "device" in kwargs:
        on_meta["device"] = "meta"
    out = func(*args, **on_meta)
    if key is not None and isinstance(out, Tensor) and _fills_own_storage(out, by_meta.values()):
        _SHAPES[key] = out.shape, out.stride(), out.dtype
    return tree_map_only(Tensor, lambda x: by_meta[id(x)] if id(x) in by_meta else ShapeOnly(x), out)


_SHAPES: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}
"""Shapes of results by operation and fake arguments: torch's meta functions are slow, and layers repeat them."""


@cache
def _overwrites_first(func: Any) -> bool:
    """Whether an operation only overwrites the contents of its first argument."""
    return (
        func.namespace == "aten"
        and func._schema.name.endswith("_")
        and torch.Tag.inplace_view not in func.tags
    )


@cache
def _returns_no_alias(func: Any) -> bool:
    """Whether an operation's schema says that its results alias no argument."""
    named = (*func._schema.arguments, *func._schema.returns)
    return func.namespace == "aten" and all(x.alias_info is None for x in named)


def _fills_own_storage(made: Tensor, inputs: Iterable["ShapeOnly"]) -> bool:
    new = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device="meta").untyped_storage()
    storage = made.untyped_storage()
    return storage.nbytes() == new.nbytes() and all(
        storage._cdata != x.untyped_storage()._cdata for x in inputs
    )


def _signature(x: Any) -> Any:
    """The part of an argument that decides sizes: no contents of tensors, and types of others, as 1 == 1.0."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype
    return tuple([_signature(y) for y in x]) if isinstance(x, list | tuple) else (type(x), x)


def _makes_mask(tensors: list[Tensor]) -> bool:
    """Whether an operation broadcasts to so many pairs of tokens that its result must be a mask."""
    if len(tensors) < 2 or len({x.shape for x in tensors}) < 2:
        return False
    sizes = itertools.zip_longest(*(reversed(x.shape) for x in tensors), fillvalue=1)
    # Many elements alone are not pairs: an operation on very many tokens has them too.
    return math.prod(map(max, sizes)) > max(MANY_PAIRS, 100 * max(x.numel() for x in tensors))


def _meta(x: Tensor) -> Tensor:
    return x.meta if isinstance(x, ShapeOnly) else x.to("meta")


OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather_base": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "alltoall_base": "all_to_all",
}
"""c10d's name -> torch.distributed's, if they differ."""

WITH_OUTPUT = frozenset(
    ("allgather", "allgather_base", "reduce_scatter", "reduce_scatter_base", "alltoall", "alltoall_base")
)


def _group_name(group: Any) -> str:
    try:
        return ProcessGroup.unbox(group).group_name
    except (RuntimeError, TypeError):  # reduce operations are script objects, too
        return ""


def _makes_integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is None:
        return func in RANGES and all(isinstance(x, int) for x in args)
    return (func in RANGES or func in FACTORIES) and not dtype.is_floating_point


def _mask_indices(index: Tensor | None) -> tuple[Tensor | None, ...]:
    if index is None or index.dtype != torch.bool or isinstance(index, ShapeOnly):
        return (index,)
    return index.nonzero(as_tuple=True)


def _set_positions(gathered: Tensor, mine: Tensor) -> None:
    """Turn an all-gather of a fake group, which repeats `mine`, into the positions of one document's shards."""
    shards = gathered.view(-1, *mine.shape)
    first = mine.flatten()[0] // len(mine)
    steps = torch.arange(len(shards)) - first
    shards.copy_(mine + (steps * len(mine)).view(-1, *[1] * mine.dim()))

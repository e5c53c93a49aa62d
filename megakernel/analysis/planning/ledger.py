"""What tensors take and what collectives send, counted while they run: on real tensors or on fake ones.

Fake tensors have shapes and no numbers, so that a layer of any size runs in a second and takes no memory. Integers stay
real beside them: where documents lie decides what attention does next. Masks of pairs of tokens decide nothing.
"""

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

aten, c10d = torch.ops.aten, torch.ops.c10d

FACTORIES = frozenset((aten.empty.memory_format, aten.zeros.default, aten.ones.default, aten.full.default))
RANGES = frozenset((aten.arange.default, aten.arange.start, aten.arange.start_step))

MANY_PAIRS = 2**22
"""Numbers from which on a comparison of integers is a mask, and has none."""

Region = int | Literal["attention"]
"""A layer of those that run, by its index, or attention inside of one."""

Moment = tuple[bool, Region]
"""Of a forward (False) and backward (True)."""


class Sent(NamedTuple):
    """A kind of message."""

    group: str
    """Name of its process group."""

    operation: str
    """As torch.distributed names it; `point-to-point` where ranks pass a message on and wait for it."""

    backward: bool
    """Whether it goes in backward."""

    waits: bool
    """Whether the process waits for it where it sends it."""


class Ledger(TorchDispatchMode):
    """Counts while it is on. Counted of a collective is what this process hands in."""

    def __init__(self, numbers: bool = True) -> None:
        """numbers: whether tensors are real; else floats have none."""
        super().__init__()
        self.now = 0
        """Bytes of all tensors made or added here that are still alive."""
        self.peaks: dict[Moment, int] = {}
        """The most there were at once, by moment."""
        self.region: Region = 0
        """What runs; whoever runs it says so."""
        self.bytes: Counter[Sent] = Counter()
        self.calls: Counter[Sent] = Counter()
        self.operations = 0
        self.backward = False
        self._with_numbers = numbers
        self._passing = False
        self._made = 0
        self._numbers: dict[int, int] = {}
        """Address of a storage -> its number."""
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Address of a storage -> what tells of its end."""
        self._sizes: dict[int, int] = {}
        """Number of a storage -> its bytes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would load its compiler, to tell it that there is nothing to compile

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation, and count what it makes or sends."""
        kwargs = kwargs or {}
        self.operations += 1
        if func.namespace == "c10d":
            self._count_message(func, args)
        out = func(*args, **kwargs) if self._with_numbers else without_numbers(func, args, kwargs)
        for x in (out,) if isinstance(out, Tensor) else tree_iter(out):
            if isinstance(x, Tensor):
                self.add(x)
        return out

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is not counted yet."""
        storage = _storage(tensor)
        if storage._cdata in self._numbers:
            return
        self._made += 1
        self._numbers[storage._cdata] = self._made
        self._sizes[self._made] = storage.nbytes()
        self.now += storage.nbytes()
        moment = self.backward, self.region
        self.peaks[moment] = max(self.peaks.get(moment, 0), self.now)
        address = storage._cdata
        self._ends[address] = weakref.ref(storage, lambda _: self._gone(address))

    def number(self, tensor: Tensor) -> int:
        """Of a tensor's storage; no other ever has it."""
        return self._numbers[_storage(tensor)._cdata]

    def alive(self) -> dict[int, int]:
        """Bytes of each storage that lives, by its number."""
        return dict(self._sizes)

    @contextmanager
    def one_passing(self) -> Iterator[None]:
        """What is sent in here are parts of one message, which ranks pass on one behind the other."""
        self._passing = True
        yield
        self._passing = False
        for message in self.bytes:
            if message.operation == "point-to-point" and message.backward == self.backward:
                self.calls[message] += 1

    def _gone(self, address: int) -> None:
        del self._ends[address]
        self.now -= self._sizes.pop(self._numbers.pop(address))

    def _count_message(self, func: Any, args: tuple[Any, ...]) -> None:
        operation = func._schema.name.removeprefix("c10d::").strip("_")
        group = next((_group_name(arg) for arg in args if isinstance(arg, torch.ScriptObject)), "")
        names = [x.name for x in func._schema.arguments]
        # An argument that has its default is not handed on, and this one's is True.
        is_async = operation == "send" or ("async_op" in names and all(args[names.index("async_op") :][:1]))
        name = "point-to-point" if self._passing else OPERATIONS.get(operation, operation)
        message = Sent(group, name, self.backward, not is_async)
        # Collectives that have an output name it first.
        tensors = args[1] if operation in WITH_OUTPUT else args[0]
        if operation != "recv":
            self.bytes[message] += sum(x.nbytes for x in tree_iter(tensors) if isinstance(x, Tensor))
            self.calls[message] += not self._passing


class Numberless(Tensor):
    """A tensor on the CPU that has a shape and no numbers."""

    meta: Tensor
    """The same on torch's meta device, whose storage stands for this one's."""

    @staticmethod
    def __new__(cls, meta: Tensor) -> "Numberless":
        """Stand for the meta tensor."""
        own = Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            meta.stride(),
            meta.storage_offset(),
            dtype=meta.dtype,
            device=torch.device("cpu"),
        )
        own.meta = meta
        return own

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func, types, args=(), kwargs=None
    ):
        """Run the operation where no ledger is on."""
        return without_numbers(func, args, kwargs or {})


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.meta if isinstance(tensor, Numberless) else tensor).untyped_storage()


def without_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on floats without numbers and real integers."""
    if func is aten._local_scalar_dense.default and isinstance(args[0], Numberless):
        return 0  # no number is out of range, no mask true
    if func is aten.index.Tensor:  # the size of what a mask takes is known where the mask is real
        args = (args[0], [y for x in args[1] for y in _places(x)])
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
    real = (not isinstance(x, Numberless) and not x.is_floating_point() for x in tensors)
    has_numbers = all(real) and not _are_pairs(tensors) if tensors else _makes_integers(func, args, kwargs)
    if has_numbers:
        out = func(*args, **kwargs)
        if func is c10d._allgather_base_.default:
            _move_on(*args[:2])
        return tree_map_only(Tensor, lambda x: Numberless(x.to("meta")) if x.is_floating_point() else x, out)
    if _changes_first(func) and isinstance(args[0], Numberless):
        return args[0]
    key = (func, _form(args), _form(tuple(kwargs.items()))) if _makes_new(func) else None
    if key in _MADE:
        sizes, strides, dtype = _MADE[key]
        return Numberless(torch.empty_strided(sizes, strides, dtype=dtype, device="meta"))
    given = {id(x.meta): x for x in tensors if isinstance(x, Numberless)}
    args, on_meta = tree_map_only(Tensor, _meta, (args, kwargs))
    if "device" in kwargs:
        on_meta["device"] = "meta"
    out = func(*args, **on_meta)
    if key is not None and isinstance(out, Tensor) and _fills_own_storage(out, given.values()):
        _MADE[key] = out.shape, out.stride(), out.dtype
    return tree_map_only(Tensor, lambda x: given[id(x)] if id(x) in given else Numberless(x), out)


_MADE: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}
"""What operations gave, by their arguments without numbers: torch's way to find it is long, and layers repeat it."""


@cache
def _changes_first(func: Any) -> bool:
    """Whether an operation puts other numbers into its first argument, and does no more."""
    return (
        func.namespace == "aten"
        and func._schema.name.endswith("_")
        and torch.Tag.inplace_view not in func.tags
    )


@cache
def _makes_new(func: Any) -> bool:
    """Whether an operation says that what it gives is neither an argument nor a view of one."""
    named = (*func._schema.arguments, *func._schema.returns)
    return func.namespace == "aten" and all(x.alias_info is None for x in named)


def _fills_own_storage(made: Tensor, given: Iterable["Numberless"]) -> bool:
    alike = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device="meta").untyped_storage()
    own = made.untyped_storage()
    return own.nbytes() == alike.nbytes() and all(own._cdata != _storage(x)._cdata for x in given)


def _form(x: Any) -> Any:
    """What of an argument decides sizes: no numbers of tensors, and the types of others, as 1 is 1.0 elsewhere."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype
    return tuple([_form(y) for y in x]) if isinstance(x, list | tuple) else (type(x), x)


def _are_pairs(tensors: list[Tensor]) -> bool:
    """Whether an operation compares so many pairs of tokens that nobody decides by what it gives: a mask."""
    if len(tensors) < 2 or len({x.shape for x in tensors}) < 2:
        return False
    sizes = itertools.zip_longest(*(reversed(x.shape) for x in tensors), fillvalue=1)
    # Places of very many tokens are no pairs.
    return math.prod(map(max, sizes)) > max(MANY_PAIRS, 100 * max(x.numel() for x in tensors))


def _meta(x: Tensor) -> Tensor:
    return x.meta if isinstance(x, Numberless) else x.to("meta")


OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather_base": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "alltoall_base": "all_to_all",
}
"""torch.distributed's names of those that c10d calls otherwise."""

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


def _places(index: Tensor | None) -> tuple[Tensor | None, ...]:
    if index is None or index.dtype != torch.bool or isinstance(index, Numberless):
        return (index,)
    return index.nonzero(as_tuple=True)


def _move_on(gathered: Tensor, mine: Tensor) -> None:
    """Positions of all shards of a document that is as long as its sequence, for a fake group that repeats mine."""
    shards = gathered.view(-1, *mine.shape)
    first = mine.flatten()[0] // len(mine)
    steps = torch.arange(len(shards)) - first
    shards.copy_(mine + (steps * len(mine)).view(-1, *[1] * mine.dim()))

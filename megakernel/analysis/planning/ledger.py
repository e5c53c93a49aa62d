"""What tensors take and what collectives send, counted while they run: on real tensors or on fake ones.

Fake tensors have shapes and no numbers, so that a layer of any size runs in a second and takes no memory. Integers stay
real beside them: where documents lie decides what attention does next.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

aten, c10d = torch.ops.aten, torch.ops.c10d

FACTORIES = frozenset((aten.empty.memory_format, aten.zeros.default, aten.ones.default, aten.full.default))
RANGES = frozenset((aten.arange.default, aten.arange.start, aten.arange.start_step))


class Sent(NamedTuple):
    """A kind of message."""

    group: str
    """Name of its process group."""

    operation: str
    """As c10d names it, without underscores; `chain` where a message passes ranks one behind the other."""

    backward: bool
    """Whether it goes in backward."""

    waits: bool
    """Whether the process waits for it where it sends it."""


class Ledger(TorchDispatchMode):
    """Counts while it is on. Counted of a collective is what this process hands in."""

    def __init__(self, fake: FakeTensorMode | None = None) -> None:
        """fake: the mode that is on below this one; None: tensors are real."""
        super().__init__()
        self.now = 0
        """Bytes of all tensors made or added here that are still alive."""
        self.peaks = {False: 0, True: 0}
        """The most there were at once, inside attention or outside."""
        self.inside = False
        """Whether attention runs; whoever runs it says so."""
        self.bytes: Counter[Sent] = Counter()
        self.calls: Counter[Sent] = Counter()
        self.operations = 0
        self.backward = False
        self._fake = fake
        self._chain = False
        self._made = 0
        self._numbers: dict[int, int] = {}
        """Address of a storage -> its number."""
        self._sizes: dict[int, int] = {}
        """Number of a storage -> its bytes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation, and count what it makes or sends."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three operations on fake tensors ask for it
        kwargs = kwargs or {}
        self.operations += 1
        if func.namespace == "c10d":
            self._count_message(func, args)
        fake = self._fake
        out = func(*args, **kwargs) if fake is None else _without_numbers(fake, func, args, kwargs)
        for x in tree_iter(out):
            if isinstance(x, Tensor):
                self.add(x)
        return out

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is not counted yet."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._numbers:
            return
        self._made += 1
        self._numbers[storage._cdata] = self._made
        self._sizes[self._made] = storage.nbytes()
        self.now += storage.nbytes()
        self.peaks[self.inside] = max(self.peaks[self.inside], self.now)
        weakref.finalize(storage, self._gone, storage._cdata)

    @property
    def peak(self) -> int:
        """The most bytes there were at once; whoever asks from a point on sets it to `now` there."""
        return max(self.peaks.values())

    @peak.setter
    def peak(self, value: int) -> None:
        self.peaks = {False: value, True: value}

    def number(self, tensor: Tensor) -> int:
        """Of a tensor's storage; no other ever has it."""
        return self._numbers[tensor.untyped_storage()._cdata]

    def alive(self) -> dict[int, int]:
        """Bytes of each storage that lives, by its number."""
        return dict(self._sizes)

    @contextmanager
    def one_chain(self) -> Iterator[None]:
        """What is sent in here are parts of one message, which ranks pass on one behind the other."""
        self._chain = True
        yield
        self._chain = False
        for message in self.bytes:
            if message.operation == "chain" and message.backward == self.backward:
                self.calls[message] += 1

    def _gone(self, address: int) -> None:
        self.now -= self._sizes.pop(self._numbers.pop(address))

    def _count_message(self, func: Any, args: tuple[Any, ...]) -> None:
        operation = func._schema.name.removeprefix("c10d::").strip("_")
        group = next((_group_name(arg) for arg in args if isinstance(arg, torch.ScriptObject)), "")
        names = [x.name for x in func._schema.arguments]
        # An argument that has its default is not handed on, and this one's is True.
        is_async = operation == "send" or ("async_op" in names and all(args[names.index("async_op") :][:1]))
        message = Sent(group, "chain" if self._chain else operation, self.backward, not is_async)
        # Collectives that have an output name it first.
        tensors = args[1] if operation in WITH_OUTPUT else args[0]
        if operation != "recv":
            self.bytes[message] += sum(x.nbytes for x in tree_iter(tensors) if isinstance(x, Tensor))
            self.calls[message] += not self._chain


def _without_numbers(fake: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on fake floats and real integers."""
    if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
        return 0  # no number is out of range, no mask true
    if func is aten.index.Tensor:  # the size of what a mask takes is known where the mask is real
        args = (args[0], [y for x in args[1] for y in _places(x)])
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
    if not (all(map(_is_real, tensors)) if tensors else _makes_integers(func, args, kwargs)):
        return func(*args, **kwargs)
    with unset_fake_temporarily():
        out = func(*args, **kwargs)
        if func is c10d._allgather_base_.default:
            _move_on(*args[:2])
    return tree_map_only(Tensor, lambda x: fake.from_tensor(x) if x.is_floating_point() else x, out)


WITH_OUTPUT = frozenset(
    ("allgather", "allgather_base", "reduce_scatter", "reduce_scatter_base", "alltoall", "alltoall_base")
)


def _group_name(group: Any) -> str:
    try:
        return ProcessGroup.unbox(group).group_name
    except (RuntimeError, TypeError):  # reduce operations are script objects, too
        return ""


def _is_real(x: Tensor) -> bool:
    return not isinstance(x, FakeTensor) and not x.is_floating_point() and not x.is_meta


def _makes_integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is None:
        return func in RANGES and all(isinstance(x, int) for x in args)
    return (func in RANGES or func in FACTORIES) and not dtype.is_floating_point


def _places(index: Tensor | None) -> tuple[Tensor | None, ...]:
    if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
        return (index,)
    with unset_fake_temporarily():
        return index.nonzero(as_tuple=True)


def _move_on(gathered: Tensor, mine: Tensor) -> None:
    """Positions of all shards of a document that is as long as its row, for a fake group that repeats mine."""
    shards = gathered.view(-1, *mine.shape)
    first = mine.flatten()[0] // len(mine)
    steps = torch.arange(len(shards)) - first
    shards.copy_(mine + (steps * len(mine)).view(-1, *[1] * mine.dim()))

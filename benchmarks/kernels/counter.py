"""Counts what one layer starts: operations and kernels, with the bytes and FLOPs of each, by part of the model.

The layer runs forward and backward on tensors without contents, so that shapes of a GPU are counted on any machine.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from benchmarks.kernels.host import WITHOUT_WORK
from megakernel.model import LanguageModel
from megakernel.model import vocabulary_loss as loss
from megakernel.model.embedding import TokenEmbedding
from megakernel.model.head import FinalNorm
from megakernel.model.layer import MLP, TransformerLayer
from megakernel.model.norm import Norm
from megakernel.ops import layers
from megakernel.ops.dispatch import EVERYWHERE
from megakernel.ops.kernels.launch import Launch, record_launches

GATHERS = ("embedding", "index_select", "gather", "index")
"""Operations that read as many elements of their first argument as they write."""

FILLING = ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
"""Operations that write a new tensor and read none: their first argument has its dtype, and perhaps its shape."""

OVERWRITING = ("copy", "fill", "zero")
"""Operations that write to their first argument without reading it."""

CORE = "attention core"
PARTS = {
    "attention_norm": "norms and residual",
    "mlp_norm": "norms and residual",
    "attention_post_norm": "norms and residual",
    "mlp_post_norm": "norms and residual",
    "self_attention": "heads: gate, norms, copies",
    "self_attention.qkv": "projections",
    "self_attention.further": "projections",
    "self_attention.output_gate": "projections",
    "self_attention.output": "projections",
    "self_attention.short_convolution": "short convolution",
    "self_attention.core": CORE,
    "mlp": "activation of the MLP",
    "mlp.linear_fc1": "MLP",
    "mlp.linear_fc2": "MLP",
}
"""Module of a layer -> the part that its work belongs to."""

EMBEDDINGS, RESIDUAL, HEAD = "embeddings", "norms and residual", "head and loss"


class Work(NamedTuple):
    """One operation of torch, or one launch of a kernel."""

    part: str

    name: str

    is_launch: bool
    """Whether it is a launch of a kernel of this repository."""

    bytes: int
    """Every tensor that it reads or writes, once."""

    flops: int
    """Of torch's matrix products; 0 for kernels."""

    backward: bool


class Counter(TorchDispatchMode):
    """Lists the work that starts while it is active, above a `Ledger` that gives tensors their shapes.

    Work in backward belongs to the part whose forward made its node of the graph, which the node's number says.
    """

    def __init__(self, launches: list[Launch], part: str):
        """launches: filled by `record_launches`. part: of what runs outside of all marked modules."""
        super().__init__()
        self.work: list[Work] = []
        self._launches = launches
        self._part = part
        self._changes: list[tuple[int, str]] = [(0, part)]
        """Number of the first node that is made from here on, and the part that it belongs to."""
        self._last = part, False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count forward work within as this part's."""
        outer = self._part
        self._enter(name)
        try:
            yield
        finally:
            self._enter(outer)

    def _enter(self, name: str) -> None:
        self.take_launches()
        self._part = name
        self._changes.append((torch.autograd._get_sequence_nr(), name))
        self._last = name, False

    def take_launches(self) -> None:
        """Count the launches since the last operation, which belong where it does."""
        part, backward = self._last
        for launch in self._launches:
            tensors = {_place(x): _size(x) for x in _tensors(launch.arguments)}
            size = sum(tensors.values())
            self.work.append(Work(part, launch.kernel.__name__, True, size, 0, backward))
        self._launches.clear()

    def forget(self) -> None:
        """Count from here on."""
        self.take_launches()
        self.work.clear()

    def add(self, name: str, *tensors: Tensor) -> None:
        """Count a fused kernel that reads or writes each of the tensors once."""
        self.take_launches()
        part, backward = self._last = self._where()
        self.work.append(Work(part, name, True, sum(map(_size, tensors)), 0, backward))

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """Count total += a b as one product whose sum is `total`."""
        self.take_launches()
        part, backward = self._last = self._where()
        size, flops = _size(a) + _size(b) + 2 * _size(total), 2 * a.shape[0] * a.shape[1] * b.shape[1]
        self.work.append(Work(part, "addmm", False, size, flops, backward))

    def _where(self) -> tuple[str, bool]:
        """The part of what runs now, and whether it runs in backward."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self._part, False
        index = bisect_right(self._changes, node._sequence_nr(), key=lambda change: change[0])
        return self._changes[max(index - 1, 0)][1], True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation, and count it."""
        kwargs = kwargs or {}
        self.take_launches()
        self._last = self._where()
        name = func._schema.name
        if name in OPDEFS and func.namespace == "megakernel":
            with self:  # what launches the kernels, in place of the shapes that a compiler asks for
                return OPDEFS[name]._init_fn(*args, **kwargs)
        out = func(*args, **kwargs)
        short = name.removeprefix("aten::").rstrip("_")
        if short in WITHOUT_WORK or _is_view(func):
            return out
        part, backward = self._last
        packet = func._overloadpacket
        flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0
        self.work.append(Work(part, short, False, _moved(func, short, args, kwargs, out), flops, backward))
        return out


def _is_view(func: Any) -> bool:
    """Whether the operation's result is its argument seen otherwise."""
    aliases = [x.alias_info for x in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _moved(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Bytes that an operation reads and writes."""
    returned = sum(_size(x) for x in tree_iter(out) if isinstance(x, Tensor))
    if name in GATHERS:
        return 2 * returned
    if name in FILLING:
        return returned
    read = written = 0
    for index, argument in enumerate(func._schema.arguments):
        given = args[index] if index < len(args) else kwargs.get(argument.name)
        size = sum(_size(x) for x in tree_iter(given) if isinstance(x, Tensor))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        written += is_written * size
        only_written = is_written and (argument.kwarg_only or name in OVERWRITING)
        read += 0 if only_written else size
    is_new = all(x.alias_info is None for x in func._schema.returns)
    return read + written + is_new * returned


def _size(x: Tensor) -> int:
    """Bytes of the tensor's elements in memory: repeated ones once, and none of a scalar that the host holds."""
    repeated = [size for size, stride in zip(x.shape, x.stride()) if stride != 0]
    count = 1
    for size in repeated:
        count *= size
    return count * x.element_size() if x.numel() else 0


def _place(x: Tensor) -> tuple[int, int, torch.Size]:
    """Equal for equal tensors."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape


def _tensors(arguments: Any) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from _tensors(argument)


@contextmanager
def marked(model: LanguageModel, counter: Counter) -> Iterator[None]:
    """Within, forward passes of the model's modules tell the counter which part runs."""
    with ExitStack() as stack:
        for module in model.modules():
            for name, part in _parts_of(module):
                inner = module.get_submodule(name) if name else module
                _wrap(inner, "forward", counter, part, stack)
                if isinstance(inner, Norm):
                    for method in ("of_sum", "and_residual"):
                        _wrap(inner, method, counter, part, stack)
        yield


def _parts_of(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of modules in `module`, and their parts."""
    if isinstance(module, TokenEmbedding):
        yield "", EMBEDDINGS
    elif isinstance(module, FinalNorm):
        yield "", RESIDUAL
    elif isinstance(module, TransformerLayer):
        assert isinstance(module.mlp, MLP)
        for name, part in PARTS.items():
            found: Any = module
            for step in name.split("."):
                found = getattr(found, step, None)
            if found is not None:
                yield name, part


def _wrap(module: nn.Module, method: str, counter: Counter, part: str, stack: ExitStack) -> None:
    # An attribute of the object, which hides the method of its class until the stack is closed.
    original = getattr(module, method)

    def counted(*args: Any, **options: Any) -> Any:
        with counter.part(part):
            return original(*args, **options)

    setattr(module, method, counted)
    stack.callback(delattr, module, method)


@contextmanager
def fused(counter: Counter) -> Iterator[None]:
    """Within, norms, SwiGLU, rotation and cross entropy count as the fused kernels that a GPU runs."""

    def kernel(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: run(counter, name, *args, **options)

    stand_ins = (
        (layers.RMS_NORM, EVERYWHERE, kernel("rms_norm", _rms_norm)),
        (layers.RMS_NORM_AND_RESIDUAL, EVERYWHERE, kernel("rms_norm", _rms_norm_and_residual)),
        (layers.ADD_RMS_NORM, EVERYWHERE, kernel("add_rms_norm", _add_rms_norm)),
        (layers.SWIGLU, EVERYWHERE, kernel("swiglu", _swiglu)),
        (layers.ROTATE, EVERYWHERE, kernel("rotate", _rotate)),
        (loss.CROSS_ENTROPIES, EVERYWHERE, kernel("cross_entropy", _cross_entropy)),
    )
    before = [(table, name, table[name]) for table, name, _ in stand_ins]
    add_product = loss._add_product
    try:
        # On a GPU one product, which here would be a product and a sum.
        loss._add_product = counter.add_product
        for table, name, stand_in in stand_ins:
            table[name] = stand_in
        yield
    finally:
        loss._add_product = add_product
        for table, name, implementation in before:
            table[name] = implementation


class _Elementwise(torch.autograd.Function):
    """Tensors of given shapes from some tensors; backward reads their gradients and the inputs, and writes as many."""

    @staticmethod
    def forward(ctx: Any, counter: Counter, name: str, shapes: Sequence[Any], *inputs: Tensor) -> Any:
        ctx.counter, ctx.name = counter, name
        ctx.save_for_backward(*inputs)
        outputs = tuple(inputs[0].new_empty(shape) for shape in shapes)
        counter.add(name, *inputs, *outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        made = tuple(
            torch.empty_like(x) if needed else None
            for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[3:])
        )
        read = [x for x in (*grads, *ctx.saved_tensors) if x is not None]
        ctx.counter.add(f"{ctx.name} backward", *read, *[x for x in made if x is not None])
        return None, None, None, *made


def _rms_norm(counter: Counter, name: str, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Any:
    (out,) = _Elementwise.apply(counter, name, [x.shape], x, weight)
    return out


def _rms_norm_and_residual(
    counter: Counter, name: str, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> Any:
    return _NormAndResidual.apply(counter, name, weight, x)


def _add_rms_norm(
    counter: Counter,
    name: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
) -> Any:
    return _NormAndResidual.apply(counter, name, weight, x, residual)


class _NormAndResidual(torch.autograd.Function):
    """The norm of one tensor or of the sum of two, and the tensor or sum.

    Backward reads both gradients and the tensor or sum, and writes one gradient, whatever the number of tensors.
    """

    @staticmethod
    def forward(ctx: Any, counter: Counter, name: str, weight: Tensor, *tensors: Tensor) -> Any:
        ctx.counter, ctx.name, ctx.summands = counter, name, len(tensors)
        made = [torch.empty_like(x) for x in tensors]  # the norm, and of two tensors the sum
        total = tensors[0] if len(tensors) == 1 else made[1]
        ctx.save_for_backward(total, weight)
        counter.add(name, weight, *tensors, *made)
        return made[0], total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        total, weight = ctx.saved_tensors
        dtotal, dweight = torch.empty_like(total), torch.empty_like(weight)
        ctx.counter.add(f"{ctx.name} backward", *grads, total, weight, dtotal, dweight)
        return None, None, dweight, *[dtotal] * ctx.summands


def _swiglu(counter: Counter, name: str, x: Tensor) -> Any:
    (out,) = _Elementwise.apply(counter, name, [(*x.shape[:-1], x.shape[-1] // 2)], x)
    return out


def _rotate(counter: Counter, name: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    # Liger-Kernel's form rotates copies in the layout (B, N, H, d), in place.
    q, k = (x.transpose(1, 2).contiguous() for x in (q, k))
    return [x.transpose(1, 2) for x in _Elementwise.apply(counter, name, [q.shape, k.shape], q, k)]


def _cross_entropy(
    counter: Counter,
    name: str,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    needs_grad: bool,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T
    counter.add(name, logits, logits)  # the gradient overwrites them
    return hidden.new_zeros(2, dtype=torch.float32), logits


def count(
    model: LanguageModel, inputs: tuple[Tensor, ...], ledger: TorchDispatchMode, outside: str
) -> list[Work]:
    """Work of one forward and backward of consecutive layers on tensors without contents.

    outside: the part of what runs outside of all modules.
    """
    with record_launches() as launches, ledger:
        counter = Counter(launches, outside)
        with fused(counter), marked(model, counter):
            with counter:
                _forward(model, inputs)
            counter.forget()  # with the tables of the positions, which the other layers share
            with counter:
                out = _forward(model, inputs)
                if out.requires_grad:  # a frozen embedding has no backward
                    torch.autograd.backward(out, None if out.dim() == 0 else torch.empty_like(out))
                counter.take_launches()
    return counter.work


def _forward(model: LanguageModel, inputs: Any) -> Tensor:
    for layer in model.layers:
        inputs = layer(inputs)
    return inputs if isinstance(inputs, Tensor) else inputs[0]

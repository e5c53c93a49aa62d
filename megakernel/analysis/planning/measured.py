"""What a part of the model takes on one device: the part itself, run forward and backward on tensors without numbers.

The process group is fake as well: it has as many ranks as the layout says, and its collectives send nothing. For a GPU,
kernels are noted down instead of launched; their operators say what they keep.
"""

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megakernel.attention.layer import AttentionLayer
from megakernel.attention.sequence import WHOLE, ContextParallelShard
from megakernel.config import Config
from megakernel.config.parallel import SoftmaxExchange
from megakernel.config.training import Recompute
from megakernel.model import LanguageModel
from megakernel.model.settings import DTYPES, model_settings
from megakernel.ops import layers
from megakernel.ops.dispatch import EVERYWHERE, VARIABLE
from megakernel.ops.kernels.launch import noting
from megakernel.parallel.axis import Axis
from megakernel.parallel.sequence import GroupShard

from .ledger import Ledger, Moment, Region, Sent

Part = Literal["first", "last"] | int
"""Embedding and positions; final norm, head and loss; or the transformer layer of this index."""

FEW_TOKENS = 8192
"""Tokens up to which a part is always run as it is: several groups of every scan."""

MANY_OPERATIONS = 8000
"""Operations from which on a part that loops over tokens or ranks is run at smaller sizes instead."""

FEW_RANKS = 8
"""Ranks up to which a ring is run as it is."""


@dataclass(frozen=True)
class Shape:
    """What decides how much a part of a configured model takes."""

    sequences: int
    """Of a micro-batch."""

    tokens: int
    """Of a sequence on one context rank."""

    tensor: int
    sequence_parallel: bool
    context: int
    recompute: Recompute
    softmax_exchange: SoftmaxExchange
    on_gpu: bool


class Amount(NamedTuple):
    """Of one kind of message."""

    bytes: float
    calls: float


@dataclass(frozen=True)
class Measured:
    """What one part takes for one micro-batch."""

    kept: float
    """Bytes that forward adds and backward needs, the output among them."""

    tables: float
    """Bytes beside them that stay, and that all layers share: what is made once of the positions of a micro-batch."""

    states: float
    """Those of them that attention made and did not hand on."""

    peaks: dict[Moment, float]
    """Bytes beyond what forward keeps, at the worst of each moment; gradients of weights are not among them."""

    sent: dict[Sent, Amount]
    """By message; groups are tp and cp."""

    operations: float

    def towards(self, other: "Measured", steps: float) -> "Measured":
        """What lies `steps` times as far from this one as the other, on the line through both."""

        def along(own: float, others: float) -> float:
            return own + steps * (others - own)

        nothing = Amount(0.0, 0.0)
        sent = {
            one: Amount(*map(along, self.sent.get(one, nothing), other.sent.get(one, nothing)))
            for one in {**self.sent, **other.sent}
        }
        kept, tables = along(self.kept, other.kept), along(self.tables, other.tables)
        states = along(self.states, other.states)
        peaks = {moment: along(bytes, other.peaks[moment]) for moment, bytes in self.peaks.items()}
        return Measured(kept, tables, states, peaks, sent, along(self.operations, other.operations))

    @property
    def excess(self) -> float:
        """Bytes beyond what forward keeps, at the worst moment of all."""
        return max(self.peaks.values())


class Measure:
    """Measures parts of a configured model, each shape once."""

    def __init__(self, config: Config, vocab_size: int) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self._known: dict[tuple[Part, Shape], Measured] = {}
        self._parameters: dict[tuple[Part, int], int] = {}

    def of(self, part: Part, shape: Shape) -> Measured:
        """Measure a part.

        Large shapes are found from small ones, where the numbers lie on a line: over sequences that are not sharded
        (states of more sequences may take another way between ranks); over context ranks, of a ring; over tokens, of a
        part that loops over them. `tests/unit/analysis/planning` holds that: kernels choose how many states they keep
        by the size of what they are given, which bends the lines by less than a thousandth.
        """
        if shape.sequences > 4 and shape.context == 1:
            two, four = (self.of(part, replace(shape, sequences=sequences)) for sequences in (2, 4))
            return two.towards(four, shape.sequences / 2 - 1)
        if shape.context > FEW_RANKS and shape.softmax_exchange == "ring":
            few, more = (
                self.of(part, replace(shape, context=ranks)) for ranks in (FEW_RANKS // 2, FEW_RANKS)
            )
            longer = few.towards(more, shape.context / (FEW_RANKS // 2) - 1)
            return replace(
                more, sent=longer.sent, operations=longer.operations
            )  # a ring holds two shards at most
        if shape.tokens > self._few(part) and (order := self._order(part, shape)):
            return self._longer(part, shape, order)
        return self._run(part, shape)

    def _few(self, part: Part) -> int:
        """Tokens up to which a part is run as it is: of those it has in chunks, several chunks."""
        training = self.config.training
        if part == "last":
            return 4 * training.loss_chunk_size
        chunk = training.mlp_chunk_size
        return max(FEW_TOKENS, 4 * 2 ** (chunk - 1).bit_length() if chunk else 0)

    def parameters(self, part: Part, tensor: int, sequence_parallel: bool) -> int:
        """Trained numbers of the part that one tensor rank holds."""
        key = part, tensor
        if key not in self._parameters:
            shape = Shape(1, 1, tensor, sequence_parallel, 1, "none", "auto", False)
            with _alone(shape) as (tp, cp), Ledger(numbers=False) as ledger:
                model = LanguageModel(self._settings(shape, tp, cp, ledger), self._places(part))
            self._parameters[key] = sum(x.numel() for x in model.parameters())
        return self._parameters[key]

    def _order(self, part: Part, shape: Shape) -> int:
        """Degree of the polynomial in tokens by which a shape is found; 0: it is run as it is."""
        if part == "last" and self.config.model.classifier is None:
            return 1
        probe = replace(shape, sequences=1, tensor=1, sequence_parallel=False, context=1)
        few = self._few(part)
        half, whole = (self.of(part, replace(probe, tokens=n)) for n in (few // 2, few))
        tokens = shape.tokens * shape.context if isinstance(part, int) else shape.tokens
        found = half.towards(whole, shape.sequences * tokens / (few // 2) - 1)
        if found.operations < MANY_OPERATIONS:
            return 0
        quarter = self.of(part, replace(probe, tokens=few // 4))
        return 1 if abs(quarter.towards(half, 3).kept / whole.kept - 1) < 0.01 else 2

    def _longer(self, part: Part, shape: Shape, order: int) -> Measured:
        few = self._few(part)
        sizes = (few // 4, few // 2, few)
        quarter, half, whole = (self.of(part, replace(shape, tokens=n)) for n in sizes)
        line = half.towards(whole, shape.tokens / sizes[1] - 1)
        if order == 1:
            return line
        # Masks of packed softmax, of a CPU, are numbers for pairs of tokens: a parabola through all three.
        bend = (whole.kept - quarter.towards(half, 3).kept) / ((sizes[2] - sizes[0]) * (sizes[2] - sizes[1]))
        more = bend * (shape.tokens - sizes[1]) * (shape.tokens - sizes[2])
        return replace(line, kept=line.kept + more, states=line.states + more)

    def _run(self, part: Part, shape: Shape) -> Measured:
        key = part, shape
        if key not in self._known:
            with _alone(shape) as (tp, cp), _stack(shape.on_gpu):
                ledger = Ledger(numbers=False)
                with Ledger(numbers=False):
                    model = LanguageModel(self._settings(shape, tp, cp, ledger), self._places(part)).train()
                    for parameter in model.parameters():
                        narrow = parameter.to(DTYPES[self.config.training.dtype])
                        parameter.data, parameter.meta = narrow, narrow.meta  # type: ignore[attr-defined]
                    inputs = self._inputs(part, shape, cp)
                gc.disable()  # what it frees, and when, is no part of a layer
                try:
                    with ledger:
                        self._known[key] = _counted(model, inputs, ledger, {tp: "tp", cp: "cp"})
                finally:
                    gc.enable()
        return self._known[key]

    def _places(self, part: Part) -> range:
        """Of the part in the model's list of layers."""
        model = self.config.model
        if part == "first":
            return range(model.first_layer)
        start = model.first_layer + (model.num_layers if part == "last" else part)
        return range(start, start + (2 if part == "last" else 1))

    def _settings(self, shape: Shape, tp: Axis, cp: Axis, ledger: Ledger) -> Any:
        changes = {"activation_checkpointing": shape.recompute, "checkpoint_offload": False}
        training = self.config.training.model_copy(update=changes)

        def new_cp_shard() -> ContextParallelShard:
            exchange = self.config.parallel.state_exchange
            return WHOLE if cp.size == 1 else GroupShard(cp, exchange, background=_AtOnce(ledger))

        # The part of a mesh that a model asks for, without the other processes.
        mesh: Any = SimpleNamespace(
            tp=tp,
            sequence_parallel=shape.sequence_parallel,
            softmax_exchange=shape.softmax_exchange,
            new_cp_shard=new_cp_shard,
        )
        return model_settings(self.config.model_copy(update={"training": training}), mesh, self.vocab_size)

    def _inputs(self, part: Part, shape: Shape, cp: Axis) -> tuple[Tensor, ...]:
        """Sequences that are one document each, all of whose tokens count."""
        model, tokens = self.config.model, shape.tokens
        positions = torch.arange(tokens).add(cp.rank * tokens).expand(shape.sequences, -1).contiguous()
        labels = torch.zeros(shape.sequences, tokens, dtype=torch.int64)
        if model.classifier is not None:
            labels = torch.zeros(shape.sequences // model.classifier.documents, dtype=torch.int64)
        rest = (positions, labels, torch.ones(1, dtype=torch.int64))
        if part == "first":
            return (torch.zeros(shape.sequences, tokens, dtype=torch.int64), *rest)
        own = tokens // shape.tensor if shape.sequence_parallel else tokens
        sizes = (own, shape.sequences, model.hidden_size)
        hidden = torch.empty(sizes, dtype=DTYPES[self.config.training.dtype], requires_grad=True)
        return (hidden, *rest)


class _AtOnce:
    """Runs chains of messages at once; a thread would not know of fake tensors."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def run(self, passing: Callable[[], Any]) -> "Future[Any]":
        """Run the chain; what it sends is one message in parts."""
        ended: Future[Any] = Future()
        with self._ledger.one_passing():
            ended.set_result(passing())
        return ended


def _counted(
    model: LanguageModel, inputs: tuple[Tensor, ...], ledger: Ledger, groups: dict[Axis, str]
) -> Measured:
    """Run forward and backward once."""
    made: list[set[int]] = []
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            _watch(module, ledger, made)
    for tensor in (*model.parameters(), *model.buffers(), *inputs):
        ledger.add(tensor)
    for parameter in model.parameters():
        # Gradients belong to ZeRO's account.
        parameter.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", None))
    before, there = ledger.now, set(ledger.alive())
    out = inputs
    for ledger.region, layer in enumerate(model.layers):
        out = layer(out)
    loss = out if isinstance(out, Tensor) else _Loss.apply(out[0])
    # One buffer that all layers gather into.
    shared = sum(x.nbytes for x in parallel_state.get_global_memory_buffer().buffer.values())
    after = ledger.now
    alive = ledger.alive()
    del out
    ledger.backward = True
    loss.backward()
    del loss
    lasting = alive.keys() & ledger.alive().keys() - there
    tables = sum(alive[one] for one in lasting) - shared
    states = sum(alive[one] for one in (made[0] if made else ()) if one in alive and one not in lasting)
    names = {str(axis.group.group_name): name for axis, name in groups.items() if axis.size > 1}
    sent = {
        message._replace(group=names[message.group]): Amount(amount, ledger.calls[message])
        for message, amount in ledger.bytes.items()
        if message.group in names
    }
    kept = after - before - shared - tables
    peaks = {moment: bytes - after + shared for moment, bytes in ledger.peaks.items()}
    return Measured(kept, tables, states, peaks, sent, ledger.operations)


def _watch(core: AttentionLayer, ledger: Ledger, made: list[set[int]]) -> None:
    """Tell the ledger when attention runs, and note which storages it makes, but for its output."""
    there: set[int] = set()
    outside = ledger.region

    def now(region: Region) -> None:
        ledger.region = region

    def enter(core: AttentionLayer, given: tuple[Any, ...]) -> None:
        there.update(ledger.alive())
        now("attention")
        if given[0].requires_grad:
            given[0].register_hook(lambda grad: now(outside))

    def leave(core: AttentionLayer, given: tuple[Any, ...], out: Tensor) -> None:
        made.append(set(ledger.alive()) - there - {ledger.number(out)})
        now(outside)
        if out.requires_grad:
            out.register_hook(lambda grad: now("attention"))

    core.register_forward_pre_hook(enter)
    core.register_forward_hook(leave)


class _Loss(torch.autograd.Function):
    """Something to begin backward with that keeps nothing alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.like = x.shape, x.dtype
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty(ctx.like[0], dtype=ctx.like[1])


@contextmanager
def _alone(shape: Shape) -> Iterator[tuple[Axis, Axis]]:
    """This process as one of the ranks that share a part, with a neighbour on each side where there are three."""
    rank = shape.tensor if shape.context > 2 else 0
    world = shape.tensor * shape.context
    hook = sys.excepthook  # torch puts the rank before what it prints, one more with every world
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    parallel_state._set_global_memory_buffer()
    try:
        groups = (range(rank, rank + shape.tensor), range(0, world, shape.tensor))
        tp, cp = (Axis.of(dist.new_group(list(ranks), backend="fake")) for ranks in groups)
        yield tp, cp
    finally:
        parallel_state.destroy_global_memory_buffer()
        dist.destroy_process_group()
        sys.excepthook = hook


@contextmanager
def _stack(on_gpu: bool) -> Iterator[None]:
    """The implementations that run there, whatever the environment asks for."""
    chosen = os.environ.pop(VARIABLE, None)
    plain = [(one, one[EVERYWHERE]) for one in (layers.RMS_NORM, layers.SWIGLU)]
    try:
        with warnings.catch_warnings(), ExitStack() as stack:
            warnings.simplefilter("ignore", RuntimeWarning)
            if on_gpu:
                stack.enter_context(noting())
                layers.RMS_NORM[EVERYWHERE], layers.SWIGLU[EVERYWHERE] = _rms_norm, _swiglu
            yield
    finally:
        for implementations, formula in plain:
            implementations[EVERYWHERE] = formula
        if chosen is not None:
            os.environ[VARIABLE] = chosen


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return _Fused.apply(x, weight, x.shape[-1], x.shape[:-1])


def _swiglu(x: Tensor) -> Tensor:
    return _Fused.apply(x, None, x.shape[-1] // 2, (0,))


class _Fused(torch.autograd.Function):
    """A stand-in for Liger-Kernel's fused functions, which save their input, and norms a number for each token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, width: int, numbers: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(numbers))
        return x.new_empty(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None, None


_KNOWN: dict[tuple[Any, ...], Measure] = {}


def measure_of(config: Config, vocab_size: int) -> Measure:
    """The measurements of this configuration; what decides nothing of one device's work may differ."""
    training = config.training
    sizes = (training.seq_len, training.dtype, training.mlp_chunk_size, training.loss_chunk_size)
    sequences = (config.data.isolate_documents, config.parallel.state_exchange, config.optimizer.updates)
    key = (config.model.model_dump_json(), vocab_size, *sizes, *map(str, sequences))
    return _KNOWN.setdefault(key, Measure(config, vocab_size))

"""Memory and traffic of a part of the model on one device, measured by running it on tensors without contents.

The process group is fake as well: it has as many ranks as the layout, and its collectives send nothing. For a GPU,
kernel launches are recorded instead of made; the kernels' operators define the saved activations. Without Triton, which
they are written in, attention other than softmax is counted in its chunked form (`counts_kernels`).
"""

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
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

from megakernel.attention.compression import shared_compressors
from megakernel.attention.sequence import WHOLE_SEQUENCE, ContextParallelShard
from megakernel.config import Config, Model
from megakernel.config.parallel import SoftmaxExchange
from megakernel.config.training import Recompute
from megakernel.model import LanguageModel
from megakernel.model.settings import DTYPES, model_settings
from megakernel.ops import layers
from megakernel.ops.dispatch import EVERYWHERE, VARIABLE, as_on_gpu
from megakernel.parallel.axis import Axis
from megakernel.parallel.sequence import GroupShard

from .gpus import counts_kernels
from .ledger import Ledger, Message

Part = Literal["first", "last"] | int
""""first": embedding and positions; "last": final norm, head and loss; otherwise index of a transformer layer."""

DIRECT_TOKENS = 16_384
"""Sequences up to this length are run directly; half of it is several groups of every scan."""

MANY_OPERATIONS = 8000
"""A part that loops over tokens in this many operations or more is extrapolated from smaller sizes."""

DIRECT_RANKS = 8
"""Rings of up to this many ranks are run directly."""


@dataclass(frozen=True)
class PartShape:
    """The sizes that determine the cost of a part of a configured model."""

    sequences: int
    """Sequences of a micro-batch."""

    tokens: int
    """Tokens of a sequence on one context rank."""

    tensor: int
    sequence_parallel: bool
    context: int
    recompute: Recompute
    softmax_exchange: SoftmaxExchange
    on_gpu: bool
    shards_per_machine: int = 1
    """Context ranks on one machine."""


@dataclass(frozen=True)
class PartCosts:
    """Costs of one part for one micro-batch."""

    saved: float
    """Bytes of saved activations, including the output."""

    tables: float
    """Bytes made once from the positions of a micro-batch and shared by all layers; not part of `saved`."""

    peaks: tuple[float, float]
    """Peak bytes of forward and of backward in excess of saved activations, without gradients of weights."""

    sent: dict[Message, float]
    """Bytes by message; groups are tp, cp, and `copies`: the tensor ranks of one key head."""

    operations: float

    def extrapolated(self, other: "PartCosts", steps: float) -> "PartCosts":
        """Linear extrapolation: this one plus `steps` times its difference to the other."""

        def along(start: float, end: float) -> float:
            return start + steps * (end - start)

        sent = {
            message: along(self.sent.get(message, 0.0), other.sent.get(message, 0.0))
            for message in {**self.sent, **other.sent}
        }
        saved, tables = along(self.saved, other.saved), along(self.tables, other.tables)
        # Peaks may fall with length as long as there are few blocks to choose from; they are not extrapolated to less.
        forward, backward = (max(along(*pair), pair[1]) for pair in zip(self.peaks, other.peaks))
        operations = along(self.operations, other.operations)
        return PartCosts(saved, tables, (forward, backward), sent, operations)

    @property
    def excess(self) -> float:
        """Peak bytes in excess of saved activations."""
        return max(self.peaks)


class WeightCounts(NamedTuple):
    """Numbers of weights on one device."""

    all: int
    trained: int
    matrices: tuple[int, ...]
    """Of each of the matrices that Muon would train."""

    shared: int
    """Of all: E and F that further layers with this compression do not have of their own."""

    shared_trained: int
    """Of trained: the same."""


def _all_and_trained(weights: Sequence[Tensor]) -> tuple[int, int]:
    return sum(x.numel() for x in weights), sum(x.numel() for x in weights if x.requires_grad)


class CostMeter:
    """Measures parts of a configured model, each shape once."""

    def __init__(self, config: Config, vocab_size: int) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self._known: dict[tuple[Part, PartShape], PartCosts] = {}
        self._parameters: dict[tuple[Part, int], WeightCounts] = {}

    def costs(self, part: Part, shape: PartShape) -> PartCosts:
        """Measure a part.

        Large shapes are extrapolated from small ones where costs are linear: in context ranks, of a ring; in tokens, of
        a part that loops over them. `tests/unit/analysis/planning` compares the results.
        """
        if shape.context > DIRECT_RANKS and shape.softmax_exchange == "ring":
            short, more = (
                self.costs(part, replace(shape, context=ranks)) for ranks in (DIRECT_RANKS // 2, DIRECT_RANKS)
            )
            longer = short.extrapolated(more, shape.context / (DIRECT_RANKS // 2) - 1)
            return replace(more, sent=longer.sent)  # a ring holds two shards at most
        size = self._direct_tokens(part)
        is_head = part == "last" and self.config.model.classifier is None
        few = 0 if is_head else MANY_OPERATIONS  # a head is exactly linear from this size on
        if shape.tokens <= size or self._operations(part, shape, shape.tokens) < few:
            return self._run(part, shape)
        while 2 * size < shape.tokens and self._operations(part, shape, 2 * size) < few:
            size *= 2
        half, whole = (self._run(part, replace(shape, tokens=tokens)) for tokens in (size // 2, size))
        return half.extrapolated(whole, shape.tokens / (size // 2) - 1)

    def _direct_tokens(self, part: Part) -> int:
        """Sequences of up to this many tokens are run directly; it is several chunks or windows of a part with them."""
        training = self.config.training
        if part == "last":
            # Enough that hidden states take more memory than the head's gradient, as in all longer sequences.
            rows, size = self.config.model.padded_vocab_size(self.vocab_size), training.loss_chunk_size
            return 4 * size * -(-rows // size)
        chunks = [training.mlp_chunk_size]
        if isinstance(part, int):
            chunks.append(self.config.model.layer_attention(part).window)
        return max([DIRECT_TOKENS, *(4 * 2 ** (chunk - 1).bit_length() for chunk in chunks if chunk)])

    def _operations(self, part: Part, shape: PartShape, tokens: int) -> float:
        """About how many operations the part takes for this many tokens."""
        probe = replace(shape, sequences=1, tensor=1, sequence_parallel=False, context=1)
        size = self._direct_tokens(part)
        half, whole = (self._run(part, replace(probe, tokens=n)) for n in (size // 2, size))
        return half.extrapolated(whole, tokens * shape.context / (size // 2) - 1).operations

    def parameters(self, part: Part, tensor: int, sequence_parallel: bool) -> WeightCounts:
        """Parameters of the part on one tensor rank."""
        from megakernel.training.muon import whole_matrices  # imports DeepSpeed, which reads the device

        key = part, tensor
        if key not in self._parameters:
            shape = PartShape(1, 1, tensor, sequence_parallel, 1, "none", "auto", False)
            with _fake_groups(shape, self.config.model) as axes, Ledger(contents=False):
                model = self._model(part, self._settings(shape, axes))
                weights = [*model.parameters()]
                matrices = whole_matrices(model)
                shared = [one.matrices for one in shared_compressors(model) if one.matrices is not None]
            sizes = tuple(x.numel() for x in matrices)
            self._parameters[key] = WeightCounts(*_all_and_trained(weights), sizes, *_all_and_trained(shared))
        return self._parameters[key]

    def _run(self, part: Part, shape: PartShape) -> PartCosts:
        key = part, shape
        if key not in self._known:
            with self.shape_only(part, shape) as (model, inputs, ledger, axes):
                gc.disable()  # memory that it frees at random moments would be counted for the layer
                try:
                    with ledger:
                        self._known[key] = _measure_model(model, inputs, ledger, axes)
                finally:
                    gc.enable()
        return self._known[key]

    @contextmanager
    def shape_only(
        self, part: Part, shape: PartShape
    ) -> "Iterator[tuple[LanguageModel, tuple[Tensor, ...], Ledger, _Axes]]":
        """The part in training and its inputs, all without contents, a ledger for them, and the axes of fake groups."""
        with _fake_groups(shape, self.config.model) as axes, _implementations(shape.on_gpu):
            ledger = Ledger(contents=False)
            with Ledger(contents=False):
                model = self._model(part, self._settings(shape, axes)).train()
                for parameter in model.parameters():
                    narrow = parameter.to(DTYPES[self.config.training.dtype])
                    parameter.data, parameter.meta = narrow, narrow.meta  # type: ignore[attr-defined]
                inputs = self._inputs(part, shape, axes.cp)
            yield model, inputs, ledger, axes

    def _model(self, part: Part, settings: Any) -> LanguageModel:
        """The part, with the weights frozen that training freezes."""
        from megakernel.training.optimizer import is_trained  # imports DeepSpeed, which reads the device

        model = LanguageModel(settings, self._indices(part))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained(self.config, name))
        return model

    def _indices(self, part: Part) -> range:
        """The part's indices in the model's list of layers."""
        model = self.config.model
        if part == "first":
            return range(model.first_layer)
        start = model.first_layer + (model.num_layers if part == "last" else part)
        return range(start, start + (2 if part == "last" else 1))

    def _settings(self, shape: PartShape, axes: "_Axes") -> Any:
        changes = {"activation_checkpointing": shape.recompute, "checkpoint_offload": False}
        training = self.config.training.model_copy(update=changes)

        def new_cp_shard() -> ContextParallelShard:
            exchange = self.config.parallel.state_exchange
            if axes.cp.size == 1:
                return WHOLE_SEQUENCE
            per_machine = shape.shards_per_machine
            return GroupShard(axes.cp, _Synchronous(), exchange, per_machine=per_machine)

        # The attributes of a Mesh that a model reads.
        mesh: Any = SimpleNamespace(
            tp=axes.tp,
            copies=lambda key_heads: axes.copies,
            sequence_parallel=shape.sequence_parallel,
            softmax_exchange=shape.softmax_exchange,
            new_cp_shard=new_cp_shard,
        )
        return model_settings(self.config.model_copy(update={"training": training}), mesh, self.vocab_size)

    def _inputs(self, part: Part, shape: PartShape, cp: Axis) -> tuple[Tensor, ...]:
        """Inputs of one document per sequence, in which all tokens count."""
        model, tokens = self.config.model, shape.tokens
        positions = torch.arange(tokens).add(cp.rank * tokens).expand(shape.sequences, -1).contiguous()
        labels = torch.zeros(shape.sequences, tokens, dtype=torch.int64)
        if model.classifier is not None:
            labels = torch.zeros(shape.sequences // model.classifier.documents, dtype=torch.int64)
        numbers = [torch.zeros_like(positions)] if model.dropout.any else []
        rest = (positions, labels, torch.ones(1, dtype=torch.int64), *numbers)
        if part == "first":
            return (torch.zeros(shape.sequences, tokens, dtype=torch.int64), *rest)
        local_tokens = tokens // shape.tensor if shape.sequence_parallel else tokens
        sizes = (local_tokens, shape.sequences, model.hidden_size)
        hidden = torch.empty(sizes, dtype=DTYPES[self.config.training.dtype], requires_grad=True)
        return (hidden, *rest)


class _Synchronous:
    """Runs state passing synchronously: the ledger is active only in this thread."""

    def run(self, pass_states: Callable[[], Any]) -> "Future[Any]":
        """Run `pass_states`."""
        future: Future[Any] = Future()
        future.set_result(pass_states())
        return future


def _measure_model(
    model: LanguageModel, inputs: tuple[Tensor, ...], ledger: Ledger, axes: "_Axes"
) -> PartCosts:
    """Measure one forward and backward."""
    for tensor in (*model.parameters(), *model.buffers(), *inputs):
        ledger.add(tensor)
    for parameter in model.parameters():
        # Free gradients of weights: they are counted by ZeRO's stage instead.
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", None))
    before = ledger.live_bytes
    out = inputs
    for layer in model.layers:
        out = layer(out)
    loss = out if isinstance(out, Tensor) else _Loss.apply(out[0])
    # Megatron-core's buffer that all layers gather into.
    shared = sum(x.nbytes for x in parallel_state.get_global_memory_buffer().buffer.values())
    after, forward_peak = ledger.live_bytes, ledger.peak
    ledger.peak = after
    del out
    if loss.requires_grad:  # a frozen embedding has no backward
        loss.backward()
    del loss
    inputs[0].grad = None
    tables = ledger.live_bytes - before - shared
    # One key head: its copies are on all tensor ranks, whose group is named last.
    groups = {"copies": axes.copies, "cp": axes.cp, "tp": axes.tp}
    names = {str(axis.group.group_name): name for name, axis in groups.items() if axis and axis.size > 1}
    sent = {
        message._replace(group=names[message.group]): float(size)
        for message, size in ledger.sent.items()
        if message.group in names
    }
    peaks = (forward_peak - after + shared, ledger.peak - after + shared)
    return PartCosts(after - before - shared - tables, tables, peaks, sent, ledger.operations)


class _Loss(torch.autograd.Function):
    """A scalar to start backward from that keeps no tensor alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.like = x.shape, x.dtype
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty(ctx.like[0], dtype=ctx.like[1])


class _Axes(NamedTuple):
    """The axes of a mesh along which a part sends."""

    tp: Axis
    cp: Axis
    copies: Axis | None
    """See `Mesh.copies`."""


@contextmanager
def _fake_groups(shape: PartShape, model: Model) -> Iterator[_Axes]:
    """Fake groups; with three or more context ranks this one has neighbors on both sides."""
    rank = shape.tensor if shape.context > 2 else 0
    world = shape.tensor * shape.context
    hook = sys.excepthook  # every init_process_group wraps it once more, to print the rank
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    parallel_state._set_global_memory_buffer()
    try:
        tp, cp = _fake_axis(range(rank, rank + shape.tensor)), _fake_axis(range(0, world, shape.tensor))
        copies = None
        if shape.tensor > model.kv_heads:
            ranks = range(rank, rank + shape.tensor // model.kv_heads)
            copies = tp if model.kv_heads == 1 else _fake_axis(ranks)
        yield _Axes(tp, cp, copies)
    finally:
        parallel_state.destroy_global_memory_buffer()
        dist.destroy_process_group()
        sys.excepthook = hook


def _fake_axis(ranks: range) -> Axis:
    return Axis.of(dist.new_group(list(ranks), backend="fake"))


@contextmanager
def _implementations(on_gpu: bool) -> Iterator[None]:
    """Use the implementations of a GPU or of a CPU, whatever the environment variable says."""
    chosen = os.environ.pop(VARIABLE, None)
    fused = (
        (layers.RMS_NORM, _rms_norm),
        (layers.RMS_NORM_AND_RESIDUAL, _rms_norm_and_residual),
        (layers.ADD_RMS_NORM, _add_rms_norm),
        (layers.SWIGLU, _swiglu),
    )
    previous = [(implementations, implementations[EVERYWHERE]) for implementations, _ in fused]
    try:
        with warnings.catch_warnings(), ExitStack() as stack:
            warnings.simplefilter("ignore", RuntimeWarning)
            if on_gpu:
                stack.enter_context(as_on_gpu())
                if counts_kernels():
                    from megakernel.ops.kernels.launch import record_launches

                    stack.enter_context(record_launches(keep=False))
                for implementations, stand_in in fused:
                    implementations[EVERYWHERE] = stand_in
            yield
    finally:
        for implementations, formula in previous:
            implementations[EVERYWHERE] = formula
        if chosen is not None:
            os.environ[VARIABLE] = chosen


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return _Fused.apply(x, weight, x.shape[-1], x.shape[:-1])


def _rms_norm_and_residual(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    return _rms_norm(x, weight, eps, offset), x


def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    total = residual + x
    return _rms_norm(total, weight, eps, offset), total


def _swiglu(x: Tensor) -> Tensor:
    return _Fused.apply(x, None, x.shape[-1] // 2, (0,))


class _Fused(torch.autograd.Function):
    """A stand-in for Liger-Kernel's fused functions, which save their input; norms also save a number per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, width: int, numbers: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(numbers))
        return x.new_empty(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None, None


_METERS: dict[tuple[Any, ...], CostMeter] = {}


def meter_of(config: Config, vocab_size: int) -> CostMeter:
    """The measurements of this configuration, shared by configurations whose work on one device is the same."""
    training = config.training
    sizes = (training.seq_len, training.dtype, training.mlp_chunk_size, training.loss_chunk_size)
    frozen = (config.optimizer.updates, config.optimizer.trained, config.objective.kind)
    sequences = (config.data.isolate_documents, config.parallel.state_exchange, *frozen)
    key = (config.model.model_dump_json(), vocab_size, *sizes, *map(str, sequences))
    return _METERS.setdefault(key, CostMeter(config, vocab_size))

"""The base class of attention layers: padding, positions, and sequences that are continued."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import DEFAULT_INPUTS, AttentionInputs
from megakernel.attention.rotary import Rotary
from megakernel.config.attention import Attention
from megakernel.config.mechanisms import LayerShape
from megakernel.ops.arguments import check_not_empty, check_positions
from megakernel.ops.documents import Positions


class FullPrecision(nn.Module):
    """A module whose parameters and buffers stay in float32 or better under `bfloat16()`, `half()` and the like.

    For parameters of exponents and angles, and for sums over many steps: bfloat16 rounds an exponent of 300 by up to
    0.6. DeepSpeed casts the parameters that it trains without calling the module: then they are bfloat16 roundings of
    its float32 master weights, and only buffers stay float32.
    """

    def _apply(self, fn, recurse=True):
        def convert(x: Tensor) -> Tensor:
            y = fn(x)
            narrowed = y.is_floating_point() and y.dtype.itemsize < 4
            return x.to(y.device) if narrowed else y

        return super()._apply(convert, recurse)


class SequenceState(NamedTuple):
    """The state of a sequence after the tokens seen so far."""

    inner: Any
    """The state of the op."""

    position: Positions
    """Position of the next token: an int for all sequences, or (B,)."""


@runtime_checkable
class HasHeadParameters(Protocol):
    """A part of a layer that has per-head parameters or buffers."""

    def sharded_parameters(self) -> dict[str, int]:
        """Name -> dimension that counts heads, of per-head parameters and buffers."""
        ...


class AttentionLayer(nn.Module, ABC):
    """Attention over (B, H, N, d) with the heads of one tensor-parallel shard.

    `sharded_parameters` names the per-head parameters and buffers; the others are replicated.
    """

    keys_per_head: int
    """Keys per position and key head that the layer expects from the projection."""

    keys_at_position: int
    """Keys per position or landmark that a query is compared with, M."""

    shared: tuple[str, ...] = ()
    """Names of the layer's own parameters that all heads share."""

    per_query_head: tuple[str, ...] = ()
    """Names of parameters and buffers that query heads own. The other sharded ones are owned by key heads, and used as
    `heads.of_key_head` returns them."""

    compresses_input = False
    """Whether k and v are projections of the layer's input after `compress`, one per landmark."""

    near_window: tuple[int, int] | None = None
    """(b, blocks): the layer attends exactly to a token's current block of b tokens and the blocks - 1 before it."""

    def __init__(self, config: Attention, settings: LayerSettings):
        """config: the mechanism. ValueError: heads that do not divide."""
        super().__init__()
        self.spec = config.spec
        heads, kv_heads = settings.num_heads, settings.num_kv_heads
        if heads % kv_heads:
            raise ValueError(f"num_heads={heads} is not a multiple of num_kv_heads={kv_heads}")
        self.heads, self.head_dim, self.causal = settings.heads, settings.head_dim, settings.causal
        self.query_heads, self.kv_heads = settings.query_heads, settings.kv_heads
        self.keys_per_head, self.keys_at_position = config.keys_per_head, config.keys_at_position
        self.expects_rotary = settings.rotary

    @property
    def state_sizes(self) -> tuple[int, int]:
        """Elements of a sequence's state: those of constant size, and those that each token adds."""
        assert self.causal
        return self.spec.state_sizes(LayerShape(len(self.query_heads), len(self.kv_heads), self.head_dim))

    @property
    def is_recurrent(self) -> bool:
        """Whether the state has constant size."""
        return self.causal and self.state_sizes[1] == 0

    def sharded_parameters(self) -> dict[str, int]:
        """Name -> dimension that counts heads, of parameters and buffers that are sharded by heads."""
        sharded = {name: 0 for name, _ in self.named_parameters(recurse=False) if name not in self.shared}
        for child, module in self.named_children():
            if isinstance(module, HasHeadParameters):
                sharded |= {f"{child}.{name}": dim for name, dim in module.sharded_parameters().items()}
        return sharded

    def finish_step(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """Update what the layer learns without gradients; called after every optimizer step.

        all_reduce: sums a tensor of the key heads over all ranks that hold them, with other tokens of the batch or
            other query heads.
        """

    def key_count(self, tokens: int) -> int:
        """Keys per key head and sequence that the layer expects with sequences of `tokens` tokens."""
        return tokens

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """Output (B, H, N, D) and the state after the last token."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs = DEFAULT_INPUTS) -> Tensor:
        """Attention over whole sequences, or over this context-parallel shard of each.

        Args:
            q: (B, H, N, d), H the heads of this shard.
            k: (B, H_kv, N, d), or (B, H_kv, M, N, d) if M = keys_per_head > 1.
            v: (B, H_kv, N, D). If the layer `compresses_input`, k and v hold L landmarks in place of N tokens.
            inputs: positions and padding; padding may be anywhere, and its output is 0.

        Returns:
            (B, H, N, D) in the dtype of v.

        Raises:
            ValueError: shapes that do not fit the layer's heads and width, no token, a missing `rotary` or `further`
                that the mechanism needs, or padding with context parallelism.
        """
        self._check(q, k, v, inputs)
        mask, positions = inputs.padding_mask, inputs.positions
        if positions is not None:
            check_positions(positions, q)
        if mask is None:
            if positions is None:
                positions = inputs.cp_shard.rank * q.shape[2]
            return self.attend(q, k, v, replace(inputs, positions=positions, return_state=False))[0]
        expected = (q.shape[0], q.shape[2])
        if tuple(mask.shape) != expected:
            raise ValueError(f"padding_mask has shape {tuple(mask.shape)}; expected {expected}")
        if inputs.cp_shard.size > 1:
            raise ValueError(
                "padding_mask is not supported with context parallelism: pad nothing, or keep the sequence whole"
            )
        # Move real tokens to the front of their sequence, in order, so that blocks and windows can ignore padding.
        mask = mask.bool()
        order = mask.int().argsort(dim=1, descending=True, stable=True)
        q = _reorder(q, order)
        if not self.compresses_input:
            k, v = _reorder(k, order), _reorder(v, order)
        further = None if inputs.further is None else _reorder(inputs.further, order)
        front = mask.gather(1, order)
        if positions is None:
            positions = 0
        elif isinstance(positions, Tensor):
            positions = positions.gather(1, order).masked_fill(~front, 0)
        inputs = replace(inputs, positions=positions, padding_mask=front, further=further, return_state=False)
        out, _ = self.attend(q, k, v, inputs)
        return _reorder(out, order.argsort(dim=1)) * mask[:, None, :, None].to(out.dtype)

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: SequenceState | None = None,
        *,
        positions: Positions | None = None,
        rotary: Rotary | None = None,
        further: Tensor | None = None,
    ) -> tuple[Tensor, SequenceState]:
        """Continue sequences by N >= 1 tokens: a prompt at once, then token by token.

        Shapes as in `forward`. state: returned by the previous call, None at the start. positions: as in
        `AttentionInputs`; None continues the sequence.

        Returns the output (B, H, N, D) and the state after the last token. Causal layers only. Raises what `forward`
        does.
        """
        if not self.causal:
            raise ValueError("extend needs a causal layer; build it with causal=True")
        inputs = AttentionInputs(rotary=rotary, further=further)
        self._check(q, k, v, inputs)
        start: Positions = 0
        if positions is not None:
            check_positions(positions, q)
            start = positions
        elif state is not None:
            start = state.position
            if isinstance(start, Tensor):
                start = start[:, None] + torch.arange(q.shape[2], device=q.device)
        inner = None if state is None else state.inner
        out, inner = self.attend(q, k, v, replace(inputs, positions=start, state=inner))
        position = start + q.shape[2] if isinstance(start, int) else start[:, -1] + 1
        return out, SequenceState(inner, position)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> None:
        """Raise ValueError for shapes that do not fit the layer, and for missing inputs that its mechanism needs."""
        several = (self.keys_per_head,) if self.keys_per_head > 1 else ()
        heads, kv_heads, width = len(self.query_heads), len(self.kv_heads), self.head_dim
        _check_shape("q", q, (None, heads, None, width))
        check_not_empty(q)
        batch, tokens = q.shape[0], q.shape[2]
        keys = self.key_count(tokens * inputs.cp_shard.size) if self.compresses_input else tokens
        _check_shape("k", k, (batch, kv_heads, *several, keys, width), self.compresses_input)
        _check_shape("v", v, (batch, kv_heads, keys, None), self.compresses_input)
        if self.spec.further:
            shape = (batch, kv_heads, tokens, self.spec.further)
            if inputs.further is None:
                raise ValueError(
                    f"further is missing: the mechanism needs a projection of the layer's input, {shape}, without "
                    "which its decay would not depend on the token; pass AttentionInputs(further=...)"
                )
            _check_shape("further", inputs.further, shape)
        elif inputs.further is not None:
            raise ValueError("further has no effect: the mechanism needs no projection of the layer's input")
        if self.spec.needs_rotary is not None and inputs.rotary is None and self.expects_rotary:
            raise ValueError(
                f"rotary is missing: the layer {self.spec.needs_rotary}; pass AttentionInputs(rotary=Rotary({width})), "
                "or build the layer with rotary=False if positions come from elsewhere"
            )


def _check_shape(name: str, x: Tensor, expected: tuple[int | None, ...], landmarks: bool = False) -> None:
    """Raise ValueError unless x has the shape, in which None is any size; it names the transposition of other code."""
    shape = tuple(x.shape)
    if len(shape) == len(expected) and all(size in (None, given) for size, given in zip(expected, shape)):
        return
    names = {4: ("batch", "heads", "tokens", "width"), 5: ("batch", "heads", "keys", "tokens", "width")}
    sizes = [word if size is None else str(size) for word, size in zip(names[len(expected)], expected)]
    remedy = ""
    if len(shape) == len(expected) == 4 and shape[2] == expected[1] != shape[1]:
        remedy = "; it looks like (batch, tokens, heads, width): pass x.transpose(1, 2)"
    elif landmarks and len(shape) == len(expected):
        remedy = (
            "; k and v are landmarks, projected from what `compress` returns for the layer's input; to pass the keys "
            "and values of all tokens, build with compression: {compress: projected}"
        )
    raise ValueError(f"{name} has shape {shape}; expected ({', '.join(sizes)}){remedy}")


def finish_step(model: nn.Module, all_reduce: Callable[[Tensor], Tensor]) -> None:
    """Call `AttentionLayer.finish_step` on all layers of a model."""
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            module.finish_step(all_reduce)


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    """x with its tokens (dimension -2) permuted by `order` (B, N)."""
    return x.gather(-2, order.view(len(x), *[1] * (x.dim() - 3), -1, 1).expand_as(x))

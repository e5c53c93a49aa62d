"""What all attention layers have in common: padding, positions, and sequences that come in parts."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import WHOLE_ROWS, AttentionInputs
from megakernel.attention.rotary import Rotary
from megakernel.config.attention import Attention
from megakernel.config.mechanisms import Shape
from megakernel.ops.arguments import check_not_empty
from megakernel.ops.documents import Positions


class FullPrecision(nn.Module):
    """A module whose parameters and buffers stay in float32 or better under `bfloat16()` and its like.

    For what makes exponents and angles of tokens, or sums over many steps: of an exponent of 300 the 8 bits of bfloat16
    leave an error of 0.6. DeepSpeed casts the parameters that it trains without asking the module: there they are
    bfloat16 roundings of its float32 master weights, and buffers alone stay.
    """

    def _apply(self, fn, recurse=True):
        def kept(x: Tensor) -> Tensor:
            y = fn(x)
            narrowed = y.is_floating_point() and y.dtype.itemsize < 4
            return x.to(y.device) if narrowed else y

        return super()._apply(kept, recurse)


class SequenceState(NamedTuple):
    """Where a sequence stands after the tokens seen so far."""

    inner: Any
    """The state of the op."""

    position: Positions
    """Position of the next token: one for all sequences, or (B,)."""


@runtime_checkable
class OfHeads(Protocol):
    """A part of a layer that holds something for each head."""

    def sharded_parameters(self) -> dict[str, int]:
        """Name -> dimension that counts heads, of parameters and buffers that belong to heads."""
        ...


class AttentionLayer(nn.Module, ABC):
    """Attention over (B, H, N, d) with the heads of one shard.

    Parameters and buffers that belong to heads are named by `sharded_parameters`; what heads share is replicated.
    """

    keys_per_head: int
    """Keys at one position that the layer wants from the projection for each key head."""

    keys_at_position: int
    """Keys that a query meets at one position or landmark, M."""

    shared: tuple[str, ...] = ()
    """Parameters of the layer itself that belong to no head."""

    compresses_input = False
    """Whether k and v come as projections of what `compress` made of the layer's input, one for each landmark."""

    near_window: tuple[int, int] | None = None
    """(b, blocks) of a layer that attends a token's current block of b tokens exactly, and the blocks - 1 before it."""

    def __init__(self, form: Attention, settings: LayerSettings):
        """form: the mechanism. ValueError: heads that do not divide."""
        super().__init__()
        self.spec = form.spec
        heads, kv_heads = settings.num_heads, settings.num_kv_heads
        if heads % kv_heads:
            raise ValueError(f"num_heads={heads} is not a multiple of num_kv_heads={kv_heads}")
        self.heads, self.head_dim, self.causal = settings.heads, settings.head_dim, settings.causal
        self.query_heads, self.kv_heads = settings.query_heads, settings.kv_heads
        self.keys_per_head, self.keys_at_position = form.keys_per_head, form.keys_at_position

    @property
    def state_sizes(self) -> tuple[int, int]:
        """Numbers one sequence carries from token to token, whatever its length, and those that each token adds."""
        assert self.causal
        return self.spec.state_sizes(Shape(len(self.query_heads), len(self.kv_heads), self.head_dim))

    @property
    def is_recurrent(self) -> bool:
        """Whether a sequence continues from a state of constant size."""
        return self.causal and self.state_sizes[1] == 0

    def sharded_parameters(self) -> dict[str, int]:
        """Name -> dimension that counts heads, of parameters and buffers that are cut over shards of heads."""
        cut = {name: 0 for name, _ in self.named_parameters(recurse=False) if name not in self.shared}
        for part, module in self.named_children():
            if isinstance(module, OfHeads):
                cut |= {f"{part}.{name}": at for name, at in module.sharded_parameters().items()}
        return cut

    def finish_step(self, total: Callable[[Tensor], Tensor]) -> None:
        """Learn what a layer learns without gradients; called after every optimizer step.

        total: the sum of a tensor over all processes that saw other tokens of the batch with the same heads.
        """

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """Output and the state behind the last token."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs = WHOLE_ROWS) -> Tensor:
        """Attention of whole sequences, or of one shard of each.

        Args:
            q: (B, H, N, d), H the heads of this shard.
            k: (B, H_kv, N, d), or (B, H_kv, M, N, d) for a layer that wants M = keys_per_head keys at a position.
            v: (B, H_kv, N, D); k and v of L landmarks for a layer that `compresses_input`.
            inputs: where the tokens stand; padding may lie anywhere and gets 0.

        Returns:
            (B, H, N, D) in the dtype of v.

        Raises:
            ValueError: shapes that do not fit; no token; padding on a shard of a sequence.
        """
        check_not_empty(q)
        mask, positions = inputs.padding_mask, inputs.positions
        if mask is None:
            if positions is None:
                positions = inputs.cp_shard.rank * q.shape[2]
            return self.attend(q, k, v, replace(inputs, positions=positions, wants_state=False))[0]
        expected = (q.shape[0], q.shape[2])
        if tuple(mask.shape) != expected:
            raise ValueError(f"padding_mask has shape {tuple(mask.shape)}; expected {expected}")
        if inputs.cp_shard.size > 1:
            raise ValueError(
                "padding_mask with a sequence in shards: pad nothing, or keep the sequence whole"
            )
        # Real tokens move to the front of their sequence, in order: blocks and windows then know nothing of padding.
        mask = mask.bool()
        order = mask.int().argsort(dim=1, descending=True, stable=True)
        q = _reorder(q, order)
        if not self.compresses_input:
            k, v = _reorder(k, order), _reorder(v, order)
        further = None if inputs.further is None else _reorder(inputs.further, order)
        front = mask.gather(1, order)
        places: Positions = 0
        if isinstance(positions, Tensor):
            places = positions.gather(1, order).masked_fill(~front, 0)
        moved = replace(inputs, positions=places, padding_mask=front, further=further, wants_state=False)
        out, _ = self.attend(q, k, v, moved)
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

        Shapes as in `forward`; state: what an earlier call returned, None at the start; positions: those of
        `AttentionInputs`, None continues.

        Returns the output (B, H, N, D) and the state behind the last token. Causal layers only.
        """
        if not self.causal:
            raise ValueError("extend needs a causal layer; build it with causal=True")
        check_not_empty(q)
        start: Positions = 0
        if positions is not None:
            start = positions
        elif state is not None:
            start = state.position
            if isinstance(start, Tensor):
                start = start[:, None] + torch.arange(q.shape[2], device=q.device)
        inner = None if state is None else state.inner
        out, inner = self.attend(q, k, v, AttentionInputs(start, rotary=rotary, further=further, state=inner))
        following = start + q.shape[2] if isinstance(start, int) else start[:, -1] + 1
        return out, SequenceState(inner, following)


def finish_step(model: nn.Module, total: Callable[[Tensor], Tensor]) -> None:
    """Tell all layers that an optimizer step ended; see `AttentionLayer.finish_step`."""
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            module.finish_step(total)


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    """Tokens (dimension -2) of x in the order (B, N)."""
    return x.gather(-2, order.view(len(x), *[1] * (x.dim() - 3), -1, 1).expand_as(x))

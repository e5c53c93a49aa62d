"""The attention weights of a few sampled queries, of any mechanism, at the cost of queries x N.

An output is a sum of values, o_i = sum_j w_ij v_j, with weights that no value changes. So w_ij is the derivative of o_i
by v_j, and one backward pass of the layer's own op gives the weights of as many queries as values are wide: whatever
the mechanism, gates and masses included, and without a second formula of it. The other way round, for numbers c_ij
of one query i, the layer run on values c_i. gives sum_j c_ij w_ij at i, whose gradients are those of a loss with
derivatives c_ij by the weights. A mechanism need be differentiable once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megakernel import attention
from megakernel.attention import AttentionLayer
from megakernel.attention.heads import generator
from megakernel.attention.inputs import WHOLE_ROWS
from megakernel.ops.dispatch import accum_dtype


@dataclass(frozen=True, kw_only=True)
class CapturedInputs(attention.AttentionInputs):
    """All that an `AttentionLayer` is called with: n tokens, one of P shards of sequences of N = P n."""

    q: Tensor
    """(B, H, n, d), not rotated; H the heads of this tensor rank."""

    k: Tensor
    """(B, H_kv, n, d), not rotated."""

    v: Tensor
    """(B, H_kv, n, D)"""

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, inputs: attention.AttentionInputs = WHOLE_ROWS
    ) -> "CapturedInputs":
        """From what a layer was called with; autograd sees constants."""
        return cls(q=q.detach(), k=k.detach(), v=v.detach(), **vars(inputs))

    def run(self, core: Callable[..., Tensor], values: Tensor | None = None) -> Tensor:
        """What the layer `core` makes of it, (B, H, n, D); with `values` (B, H_kv, n, any width) in place of v."""
        return core(self.q, self.k, self.v if values is None else values, self)

    def turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of these tokens, rotated at their `places`."""
        return replace(self, positions=self.places()).rotated(q, k)

    @property
    def length(self) -> int:
        """N, tokens of a whole sequence."""
        return self.q.shape[2] * self.cp_shard.size

    @property
    def first(self) -> int:
        """Place in the sequence of the first of these tokens."""
        return self.q.shape[2] * self.cp_shard.rank

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.q.shape[1] // self.k.shape[1]

    def places(self) -> Tensor:
        """(B, n) int64: where each real token stands in its document, what rotates it."""
        if isinstance(self.positions, Tensor):
            return self.positions.clamp(min=0)
        if self.padding_mask is not None:
            return (self.padding_mask.long().cumsum(1) - 1).clamp(min=0)
        own = torch.arange(self.first, self.first + self.q.shape[2], device=self.q.device)
        return own.expand(len(self.q), -1)

    def real(self) -> Tensor:
        """(B, N) bool, which tokens of whole sequences are no padding."""
        if self.padding_mask is not None:  # never with a sequence in shards
            return self.padding_mask.bool()
        return torch.ones(len(self.q), self.length, dtype=torch.bool, device=self.q.device)


def sample_queries(length: int, count: int, seed: int, step: int) -> Tensor:
    """Places (R,) of R = min(count, length) queries of sequences of `length` tokens, ascending.

    A function of the arguments alone: the same on all ranks and for all layers of a step.
    """
    draw = torch.randperm(length, generator=generator(seed, step, "queries"), device="cpu")
    return draw[:count].sort().values


@dataclass(frozen=True)
class SampledQueries:
    """Sampled queries of one call: who sees whom, and the weights that mechanisms give."""

    inputs: CapturedInputs

    queries: Tensor
    """(R,) places in the whole sequence."""

    visible: Tensor
    """(B, R, N) bool: the query is no padding and sees this key."""

    key_places: Tensor
    """(B, N) int64, place of each token in its document."""

    @classmethod
    def of(cls, inputs: CapturedInputs, queries: Tensor, causal: bool) -> "SampledQueries":
        """The queries at places (R,) of a call whose layer is or is not causal."""
        queries = queries.to(inputs.q.device)
        places = inputs.cp_shard.all_tokens(inputs.places()[..., None])[..., 0]
        real = inputs.real()
        visible = real[:, queries, None] & real[:, None]
        if inputs.positions is not None:
            documents = ((places == 0) & real).cumsum(1)
            visible = visible & (documents[:, queries, None] == documents[:, None])
        if causal:
            visible = visible & (torch.arange(inputs.length, device=real.device) <= queries[:, None])
        return cls(inputs, queries, visible, places)

    @property
    def real(self) -> Tensor:
        """(B, R) bool: the query is no padding."""
        return self.visible.any(-1)

    def scores(self) -> Tensor:
        """q.k / sqrt(d) of rotated queries and keys (B, H, R, N), float32 or better; of hidden keys anything."""
        inputs = self.inputs
        dtype = accum_dtype(inputs.q.dtype)
        q, k = inputs.turned(inputs.q.to(dtype), inputs.k.to(dtype))
        own, index = self._mine()
        asked = q.new_zeros(*q.shape[:2], len(self.queries), q.shape[-1])
        asked[:, :, index] = q[:, :, own]
        asked = inputs.cp_shard.total(asked) * q.shape[-1] ** -0.5
        scores = asked @ k.repeat_interleave(inputs.group, 1).transpose(-1, -2)
        return self._whole(scores)

    def softmax(self, scores: Tensor, window: int | None = None) -> Tensor:
        """The weights (B, H, R, N) of softmax attention, of `scores`; of the last `window` tokens of a sequence alone.

        Those that `weights` gives of such a layer, whose own backward pass would weigh all N x N pairs.
        """
        seen = self.visible
        if window is not None:
            seen = seen & (
                torch.arange(self.inputs.length, device=seen.device) > self.queries[:, None] - window
            )
        hidden = ~seen[:, None]
        return scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)

    def weights(self, core: Callable[..., Tensor]) -> Tensor:
        """The weights (B, H, R, N) that a layer or its `forward` gives, in float32 or better; constants to autograd.

        0 where a query sees nothing. Weights of landmarks are those that their tokens have through E and F.
        """
        inputs = self._widened()
        parts = []
        for some in self._passes():
            with torch.enable_grad():
                values = self._values().requires_grad_()
                out = inputs.run(core, values)
                (grad,) = torch.autograd.grad(out, values, self._picked(out, some))
            parts.append(self._channels(grad).permute(0, 1, 3, 4, 2).flatten(1, 2)[:, :, : len(some)])
        return self._whole(torch.cat(parts, 2))

    def weighted(self, core: AttentionLayer, slopes: Tensor) -> Tensor:
        """The sum of slopes (B, H, R, N) times the weights of `core`, over this shard's queries; a scalar.

        Differentiable by the parameters of `core`; gradients of all shards add up.
        """
        inputs = self._widened()
        mine = slopes[..., inputs.first : inputs.first + inputs.q.shape[2]]
        total = slopes.new_zeros(())
        for some in self._passes():
            values = self._values()
            by_key = (
                mine[:, :, some.start : some.stop].unflatten(1, (-1, inputs.group)).permute(0, 1, 4, 2, 3)
            )
            self._channels(values)[..., : len(some)] = by_key
            out = inputs.run(core, values)
            total = total + (out * self._picked(out, some)).sum()
        return total

    @property
    def _per_pass(self) -> int:
        """Queries of each head whose weights fit into values as wide as the layer's own, which every kernel takes."""
        return max(1, self.inputs.q.shape[-1] // self.inputs.group)

    def _passes(self) -> Iterator[range]:
        for start in range(0, len(self.queries), self._per_pass):
            yield range(start, min(start + self._per_pass, len(self.queries)))

    def _widened(self) -> CapturedInputs:
        inputs = self.inputs
        dtype = accum_dtype(inputs.q.dtype)
        return replace(inputs, q=inputs.q.to(dtype), k=inputs.k.to(dtype))

    def _values(self) -> Tensor:
        """Zeros (B, H_kv, n, G R' or wider), G query heads to a key head and R' queries in a pass."""
        batch, heads, tokens, width = self.inputs.k.shape
        width = max(width, self.inputs.group * self._per_pass)
        return self.inputs.k.new_zeros(batch, heads, tokens, width, dtype=accum_dtype(self.inputs.k.dtype))

    def _channels(self, values: Tensor) -> Tensor:
        """A view (B, H_kv, n, G, R') of the channels that belong to query heads and queries."""
        used = values[..., : self.inputs.group * self._per_pass]
        return used.unflatten(-1, (self.inputs.group, self._per_pass))

    def _mine(self, some: range | None = None) -> tuple[Tensor, Tensor]:
        """This shard's queries among `some`: their places in the shard, and their numbers among `some`."""
        queries = self.queries if some is None else self.queries[some.start : some.stop]
        places = queries - self.inputs.first
        (index,) = torch.where((places >= 0) & (places < self.inputs.q.shape[2]))
        return places[index], index

    def _picked(self, out: Tensor, some: range) -> Tensor:
        """1 where a query of the pass meets its own channel of an output like `out` (B, H, n, .), 0 elsewhere."""
        own, index = self._mine(some)
        pick = out.new_zeros(out.shape)
        by_key_head = pick.unflatten(1, (-1, self.inputs.group))
        for head in range(self.inputs.group):
            by_key_head[:, :, head, own, head * self._per_pass + index] = 1
        return pick

    def _whole(self, rows: Tensor) -> Tensor:
        """(B, H, R, n) of this shard's keys -> (B, H, R, N)."""
        return self.inputs.cp_shard.all_tokens(rows.transpose(-1, -2)).transpose(-1, -2)

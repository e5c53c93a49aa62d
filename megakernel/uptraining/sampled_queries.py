"""Attention weights of a few sampled queries, for any mechanism, at the cost of queries x N.

An output is a sum of values, o_i = sum_j w_ij v_j, with weights that do not depend on the values. So w_ij is the
derivative of o_i by v_j, and one backward pass of the layer's own op gives the weights of as many queries as values
have channels, for every mechanism, including its gates and landmark token counts, without a second implementation.
Conversely, for a query i with numbers c_ij, the layer run on values c_i. gives sum_j c_ij w_ij at i, whose gradients
are those of a loss with derivatives c_ij by the weights. A mechanism must be differentiable only once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megakernel import attention
from megakernel.attention import AttentionLayer
from megakernel.attention.heads import generator
from megakernel.attention.inputs import DEFAULT_INPUTS
from megakernel.ops.tensors import accum_dtype

KEYS_AT_ONCE = 65536
"""Keys of a shard that are converted to float32 and rotated at once."""


@dataclass(frozen=True, kw_only=True)
class CapturedInputs(attention.AttentionInputs):
    """The arguments of an `AttentionLayer`: n tokens, one of P shards of sequences of N = P n tokens."""

    q: Tensor
    """(B, H, n, d), not rotated, with the H heads of this tensor rank."""

    k: Tensor
    """(B, H_kv, n, d), not rotated."""

    v: Tensor
    """(B, H_kv, n, D)"""

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, inputs: attention.AttentionInputs = DEFAULT_INPUTS
    ) -> "CapturedInputs":
        """Capture a layer's arguments, detached."""
        return cls(q=q.detach(), k=k.detach(), v=v.detach(), **vars(inputs))

    def run(self, core: Callable[..., Tensor], values: Tensor | None = None) -> Tensor:
        """Output (B, H, n, D) of the layer `core`; values: (B, H_kv, n, any width) instead of v."""
        return core(self.q, self.k, self.v if values is None else values, self)

    def rotated_by_place(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys of these tokens by their `places`."""
        return replace(self, positions=self.places()).rotated(q, k)

    @property
    def length(self) -> int:
        """N, the tokens of a whole sequence."""
        return self.q.shape[2] * self.cp_shard.size

    @property
    def first(self) -> int:
        """Index in the whole sequence of the first of these tokens."""
        return self.q.shape[2] * self.cp_shard.rank

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    def places(self) -> Tensor:
        """(B, n) int64: position of each token in its document, for rotary embeddings."""
        if isinstance(self.positions, Tensor):
            return self.positions.clamp(min=0)
        if self.padding_mask is not None:
            return (self.padding_mask.long().cumsum(1) - 1).clamp(min=0)
        indices = torch.arange(self.first, self.first + self.q.shape[2], device=self.q.device)
        return indices.expand(len(self.q), -1)

    def real(self) -> Tensor:
        """(B, N) bool: which tokens of whole sequences are no padding."""
        if self.padding_mask is not None:  # never with context parallelism
            return self.padding_mask.bool()
        return torch.ones(len(self.q), self.length, dtype=torch.bool, device=self.q.device)


def sample_queries(length: int, count: int, seed: int, step: int) -> Tensor:
    """Draw R = min(count, length) queries of sequences of `length` tokens: ascending indices (R,).

    A function only of its arguments, so that all ranks and all layers of a step have the same.
    """
    draw = torch.randperm(length, generator=generator(seed, step, "queries"), device="cpu")
    return draw[:count].sort().values


@dataclass(frozen=True)
class SampledQueries:
    """Sampled queries of one call: their visible keys, scores and attention weights."""

    inputs: CapturedInputs

    queries: Tensor
    """(R,) indices in the whole sequence."""

    visible: Tensor
    """(B, R, N) bool: the query is no padding and sees this key."""

    key_places: Tensor
    """(B, N) int64: position of each token in its document."""

    @classmethod
    def of(cls, inputs: CapturedInputs, queries: Tensor, causal: bool) -> "SampledQueries":
        """The queries at indices (R,) of a call. causal: whether its layer is."""
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
        """q.k / sqrt(d) of rotated queries and keys (B, H, R, N), float32 or better; arbitrary for invisible keys."""
        inputs, places = self.inputs, self.inputs.places()
        dtype, width = accum_dtype(inputs.q.dtype), inputs.q.shape[-1]

        def rotated(x: Tensor, at: Tensor) -> Tensor:
            return x.to(dtype) if inputs.rotary is None else inputs.rotary(x.to(dtype), at)

        local, index = self._local_queries()
        sampled = inputs.q.new_zeros(*inputs.q.shape[:2], len(self.queries), width, dtype=dtype)
        sampled[:, :, index] = rotated(inputs.q[:, :, local], places[:, local])
        sampled = inputs.cp_shard.all_reduce(sampled) * width**-0.5
        by_key_head = sampled.unflatten(1, (-1, inputs.group)).flatten(2, 3)
        # In parts, because all keys in float32 may take more memory than the layer.
        parts = zip(inputs.k.split(KEYS_AT_ONCE, 2), places.split(KEYS_AT_ONCE, 1))
        scores = torch.cat([by_key_head @ rotated(k, at).mT for k, at in parts], -1)
        return self._gather_keys(scores.unflatten(2, (inputs.group, -1)).flatten(1, 2))

    def softmax(self, scores: Tensor, window: int | None = None) -> Tensor:
        """Softmax attention weights (B, H, R, N) of `scores`; window: only over the last `window` tokens.

        Equal to `weights` of a softmax layer, whose backward pass would compute all N x N pairs.
        """
        seen = self.visible
        if window is not None:
            seen = seen & (
                torch.arange(self.inputs.length, device=seen.device) > self.queries[:, None] - window
            )
        hidden = ~seen[:, None]
        return scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)

    def weights(self, core: Callable[..., Tensor]) -> Tensor:
        """Attention weights (B, H, R, N) of a layer or its `forward`, in float32 or better, without gradients.

        0 where a query sees nothing. A landmark's weight is distributed to its tokens through E and F.
        """
        inputs = self._accum_inputs()
        parts = []
        for part in self._passes():
            with torch.enable_grad():
                values = self._values().requires_grad_()
                out = inputs.run(core, values)
                (grad,) = torch.autograd.grad(out, values, self._query_mask(out, part))
            parts.append(self._channels(grad).permute(0, 1, 3, 4, 2).flatten(1, 2)[:, :, : len(part)])
        return self._gather_keys(torch.cat(parts, 2))

    def weighted_sum(self, core: AttentionLayer, slopes: Tensor) -> Tensor:
        """The scalar sum of slopes (B, H, R, N) times the weights of `core`, over this shard's queries.

        Differentiable by the parameters of `core`; the gradients of all shards must be added.
        """
        inputs = self._accum_inputs()
        local = slopes[..., inputs.first : inputs.first + inputs.q.shape[2]]
        total = slopes.new_zeros(())
        for part in self._passes():
            values = self._values()
            by_key = (
                local[:, :, part.start : part.stop].unflatten(1, (-1, inputs.group)).permute(0, 1, 4, 2, 3)
            )
            self._channels(values)[..., : len(part)] = by_key
            out = inputs.run(core, values)
            total = total + (out * self._query_mask(out, part)).sum()
        return total

    @property
    def _per_pass(self) -> int:
        """Queries per pass and head: their weights must fit into the layer's value width, which all kernels take."""
        return max(1, self.inputs.q.shape[-1] // self.inputs.group)

    def _passes(self) -> Iterator[range]:
        for start in range(0, len(self.queries), self._per_pass):
            yield range(start, min(start + self._per_pass, len(self.queries)))

    def _accum_inputs(self) -> CapturedInputs:
        inputs = self.inputs
        dtype = accum_dtype(inputs.q.dtype)
        return replace(inputs, q=inputs.q.to(dtype), k=inputs.k.to(dtype))

    def _values(self) -> Tensor:
        """Zeros (B, H_kv, n, G R' or wider), with G query heads per key head and R' queries per pass."""
        batch, heads, tokens, width = self.inputs.k.shape
        width = max(width, self.inputs.group * self._per_pass)
        return self.inputs.k.new_zeros(batch, heads, tokens, width, dtype=accum_dtype(self.inputs.k.dtype))

    def _channels(self, values: Tensor) -> Tensor:
        """View (B, H_kv, n, G, R') of the channels by query head and query."""
        used = values[..., : self.inputs.group * self._per_pass]
        return used.unflatten(-1, (self.inputs.group, self._per_pass))

    def _local_queries(self, part: range | None = None) -> tuple[Tensor, Tensor]:
        """This shard's queries in `part`: their indices in the shard, and their indices in `part`."""
        queries = self.queries if part is None else self.queries[part.start : part.stop]
        places = queries - self.inputs.first
        (index,) = torch.where((places >= 0) & (places < self.inputs.q.shape[2]))
        return places[index], index

    def _query_mask(self, out: Tensor, part: range) -> Tensor:
        """Mask of the shape of `out` (B, H, n, .): 1 for the channel of each query of the pass, 0 elsewhere."""
        local, index = self._local_queries(part)
        pick = out.new_zeros(out.shape)
        by_key_head = pick.unflatten(1, (-1, self.inputs.group))
        for head in range(self.inputs.group):
            by_key_head[:, :, head, local, head * self._per_pass + index] = 1
        return pick

    def _gather_keys(self, rows: Tensor) -> Tensor:
        """All-gather (B, H, R, n) of this shard's keys to (B, H, R, N)."""
        return self.inputs.cp_shard.all_tokens(rows.transpose(-1, -2)).transpose(-1, -2)

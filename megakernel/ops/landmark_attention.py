"""Causal softmax over a token's window and the landmarks of earlier blocks (the low-rank parent of FLuRKA, and EVA)."""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.arguments import check_heads, check_per_head, expand_tokens
from megakernel.ops.chunks import chunk_queries
from megakernel.ops.dispatch import accum_dtype, choose
from megakernel.ops.documents import Positions, token_positions, window_reach
from megakernel.ops.groups import Tensors, scan_groups
from megakernel.ops.mixture import by_component, first_key, pack_keys
from megakernel.ops.partial_output import merge_parts, normalized, with_ones
from megakernel.ops.window import (
    Layout,
    LocalWindow,
    Tail,
    attended,
    cut,
    softmax_pairs,
    unchunk_partial,
    window_sums,
)

GROUP = 1024
"""Queries whose weights of landmarks exist at once; the next multiple of a block is taken."""

MISSING = -(2**62)
"""The end of a block that does not exist."""


class Landmarks(NamedTuple):
    """S blocks of r landmarks each."""

    keys: Tensor
    """(B, H_kv, S, r, d), or M d where M keys stand at a landmark."""

    values: Tensor
    """(B, H_kv, S, r, D)"""

    ends: Tensor
    """(B, S) int64: place of a block's last token, counted from the first token of this shard; or MISSING."""

    def moved(self, places: int) -> "Landmarks":
        """The same landmarks for a shard that begins `places` later."""
        ends = self._ends()
        return self._replace(ends=torch.where(ends == MISSING, MISSING, ends - places))

    def after(self, other: "Landmarks | None") -> "Landmarks":
        """`other` and these."""
        if other is None:
            return self
        keys, values = (torch.cat(both, 2) for both in zip(other[:2], self[:2]))
        return Landmarks(keys, values, torch.cat([other.ends.expand(len(keys), -1), self._ends()], 1))

    def existing(self) -> "Landmarks":
        """Without the blocks that no sequence has."""
        some = (self.ends != MISSING).any(0)
        return Landmarks(self.keys[:, :, some], self.values[:, :, some], self._ends()[:, some])

    def _ends(self) -> Tensor:
        return self.ends.expand(len(self.keys), -1)


class Blocks(NamedTuple):
    """The blocks of a document that are complete at the end of each stretch of b tokens."""

    layout: Layout
    ends: Tensor
    """(B, S) as in Landmarks."""

    start: Tensor
    """(B, S): place of the block's first token in its window."""

    def last_positions(self) -> Tensor:
        """(B, S): position of the block's last token in its document; anything where there is none."""
        at = self.start - self.layout.halo + self.layout.block_size - 1
        return self.layout.places.gather(-1, at[..., None])[..., 0]

    def of(self, before: Tensor, x: Tensor) -> Tensor:
        """(B, H, tail, d) and (B, H, N, d) -> (B, H, S, b, d), the tokens of each block."""
        windows = self.layout.windows(before, x)
        if self.layout.aligned:
            return windows
        inside = torch.arange(self.layout.block_size, device=x.device)
        index = (self.start[..., None] + inside).clamp(min=0)[:, None, :, :, None]
        return windows.gather(3, index.expand(*windows.shape[:3], -1, windows.shape[-1]))


def complete_blocks(positions: Positions, length: int, device: torch.device, size: int) -> Blocks:
    """Where blocks of `size` tokens end among `length` tokens, one at most in every stretch of `size`."""
    layout = cut(positions, length, device, block_size=size, blocks=1)
    ended = layout.block_ends()
    at = ended.int().argmax(-1)
    places = at + torch.arange(at.shape[1], device=device) * layout.size
    return Blocks(layout, torch.where(ended.any(-1), places, MISSING), layout.halo + at - size + 1)


class Sight(NamedTuple):
    """What each query sees of landmarks: blocks of its own document that end before a place."""

    first: Tensor
    """(B, N): place of the first token of the query's document."""

    limit: Tensor
    """(B, N): blocks end before it."""

    def visible(self, ends: Tensor, rank: int) -> Tensor:
        """(B, N, S r) bool."""
        seen = (ends[:, None] >= self.first[..., None]) & (ends[:, None] < self.limit[..., None])
        return seen.repeat_interleave(rank, -1)


def sight(positions: Positions, length: int, device: torch.device, *, size: int, skipped: int) -> Sight:
    """Queries see blocks that end before their current block of `size` tokens and the `skipped` - 1 before it."""
    own_positions = token_positions(positions, length, device)
    places = torch.arange(length, device=device)
    return Sight(places - own_positions, places - window_reach(own_positions, size, skipped))


def landmark_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    landmarks: Landmarks,
    sight: Sight,
    *,
    window: LocalWindow,
    tail: Tail,
    token_count: float = 1.0,
    priors: Tensor | None = None,
    shift: Tensor | None = None,
    far_weight: Tensor | None = None,
    gate: Tensor | None = None,
    positions: Positions = 0,
    backend: str | None = None,
) -> Tensor:
    """Weights exp(q.k / sqrt(d)) over the window and over all landmarks in sight; quadratic in their number.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv; (B, H_kv, M, N, d) with priors and no shift.
        v: (B, H_kv, N, D).
        landmarks: of every block that a query may see, whichever shard it came from.
        sight: which of them each query sees.
        window: what a token sees exactly.
        tail: at least the window.block_size * window.blocks tokens before these.
        token_count: how many tokens a landmark stands for.
        priors: pi (H_kv, M) >= 0 of mixture keys: tokens and landmarks weigh sum_r pi_r exp(q.k_r / sqrt(d)).
        shift: b (H_kv, M, d), beside priors: the keys of a token are k + b_r; those of landmarks are handed in.
        far_weight: gamma (H,), multiplies landmarks by exp(gamma) under the common normalizer; None is 0.
        gate: logits of the window's share, broadcastable to (B, H, N): window and landmarks are then normalized
            apart. None: one normalizer for both.
        positions: (B, N) positions within documents, or the position of the first token of sequences that hold one
            document each.
        backend: reference or chunked.

    Returns:
        (B, H, N, D) in the dtype of v. Where no landmark is in sight, the window alone.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, naming the argument.
    """
    check_heads(q, first_key(k, priors, shift), v)
    check_per_head("far_weight", far_weight, q.shape[1])
    if gate is not None:
        gate = expand_tokens("gate", gate, q)
    far = (landmarks, sight, token_count, far_weight)
    return choose(IMPLEMENTATIONS, backend)(
        q, pack_keys(k), v, *far, window, tail, priors, shift, gate, positions
    )


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    landmarks: Landmarks,
    sight: Sight,
    token_count: float,
    far_weight: Tensor | None,
    window: LocalWindow,
    tail: Tail,
    priors: Tensor | None,
    shift: Tensor | None,
    gate: Tensor | None,
    positions: Positions,
) -> Tensor:
    """Windows in linear time; landmarks for some queries at a time, so that memory stays bounded."""
    varying = None if isinstance(positions, int) else positions[:, None]
    rank, ends = landmarks.keys.shape[3], landmarks.ends

    def on_group(start: int, carry: Tensors, sequences: Tensors, shared: Tensors):
        q, k, v, gate, first, limit, at = sequences
        keys, values, far_weight, priors, shift = shared
        tail, heads, length, kv_heads = Tail(*carry), q.shape[1], q.shape[2], k.shape[1]
        places = positions + start if at is None else at[:, 0]
        near = window_sums(q, k, v, tail, places, window, priors, shift)
        far_q = q.to(accum_dtype(q.dtype))
        if window.far_rotary:
            far_q = window.far_rotary(far_q, token_positions(places, length, q.device))
        queries = chunk_queries(far_q, kv_heads, length)
        visible = Sight(first[:, 0], limit[:, 0]).visible(ends, rank)[:, None]
        far = unchunk_partial(softmax_pairs(queries, keys, values, visible, priors), heads, length)
        if far_weight is not None:
            far = far._replace(values=far.values * torch.exp(far_weight)[:, None, None])
        share = None
        if gate is not None:
            # Without a landmark in sight the window alone, exactly.
            share = torch.where(visible.any(-1), torch.sigmoid(gate.to(near.values.dtype)), 1.0)
        (out,) = merge_parts(near, far, share, lambda sums: (normalized(sums),))
        return (out.to(v.dtype),), tuple(tail.after(k, v))

    dtype = accum_dtype(q.dtype)
    keys = landmarks.keys.to(dtype).flatten(2, 3)[:, :, None]
    values = with_ones(landmarks.values.to(dtype).flatten(2, 3), token_count)[:, :, None]
    wide_weight = None if far_weight is None else far_weight.to(dtype)
    sequences = (q, k, v, gate, sight.first[:, None], sight.limit[:, None], varying)
    group = window.block_size * max(1, GROUP // window.block_size)
    shared = (keys, values, wide_weight, priors, shift)
    (out,), _ = scan_groups(on_group, tuple(tail), sequences, shared, group=group)
    return out


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    landmarks: Landmarks,
    sight: Sight,
    token_count: float,
    far_weight: Tensor | None,
    window: LocalWindow,
    tail: Tail,
    priors: Tensor | None,
    shift: Tensor | None,
    gate: Tensor | None,
    positions: Positions,
) -> Tensor:
    """From the formula, query by query."""
    batch, heads, length, width = q.shape
    group, dtype, rank = heads // k.shape[1], accum_dtype(q.dtype), landmarks.keys.shape[3]
    own_positions = token_positions(positions, length, q.device)
    far_q = q.to(dtype)
    near_q, past, keys = attended(q, k, tail, positions, window, shift)
    if window.far_rotary:
        far_q = window.far_rotary(far_q, own_positions)
    keys = torch.cat([past, keys], 2).repeat_interleave(group, 1)
    values = torch.cat([tail.values, v], 2).to(dtype).repeat_interleave(group, 1)
    far_keys, far_values = (x.to(dtype).repeat_interleave(group, 1).flatten(2, 3) for x in landmarks[:2])
    keys, shares = by_component(keys, priors, width)
    far_keys, _ = by_component(far_keys, priors, width)
    ends = landmarks.ends.expand(batch, -1).tolist()
    first, limit = (x.expand(batch, -1).tolist() for x in sight)
    log_count = torch.log(torch.tensor(token_count, dtype=dtype)) + (
        0.0 if far_weight is None else far_weight[:, None, None]
    )

    outputs = []
    for b, places in enumerate(own_positions.expand(batch, -1).tolist()):
        for i, position in enumerate(places):
            oldest = max(0, (position // window.block_size - window.blocks + 1) * window.block_size)
            here = past.shape[2] + i
            seen_tokens = slice(here - (position - oldest), here + 1)
            scores = keys[:, b, :, seen_tokens] @ near_q[b, :, i, :, None] * width**-0.5
            seen = [s for s, end in enumerate(ends[b]) if first[b][i] <= end < limit[b][i]]
            at = [s * rank + place for s in seen for place in range(rank)]
            far_scores = far_keys[:, b][:, :, at] @ far_q[b, :, i, :, None] * width**-0.5 + log_count
            # Dividing all weights of a query by one number changes no quotient.
            largest = torch.cat([scores, far_scores], 2).detach().amax((0, 2), keepdim=True)
            own, other = ((shares * torch.exp(x - largest)).sum(0) for x in (scores, far_scores))
            share = None if gate is None or not seen else torch.sigmoid(gate[b, :, i, None].to(dtype))
            outputs.append(_mean(own, other, values[b, :, seen_tokens], far_values[b][:, at], share))
    out = torch.stack(outputs).view(batch, length, heads, -1).transpose(1, 2)
    return out.to(v.dtype)


def _mean(near: Tensor, far: Tensor, values: Tensor, far_values: Tensor, share: Tensor | None) -> Tensor:
    """(H, D) of weights (H, W, 1) and values (H, W, D) of tokens, and the same of landmarks."""
    sums = [((weights * of).sum(1), weights.sum(1)) for weights, of in ((near, values), (far, far_values))]
    if share is None:
        return (sums[0][0] + sums[1][0]) / (sums[0][1] + sums[1][1])
    return share * sums[0][0] / sums[0][1] + (1 - share) * sums[1][0] / sums[1][1]


IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}
"""Backend -> implementation."""

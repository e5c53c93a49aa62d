"""Causal softmax over a token's window and landmarks of earlier blocks: FLuRKA's low-rank parent, and causal EVA."""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.arguments import check_cached, check_heads, check_per_head, check_positions, expand_tokens
from megakernel.ops.chunks import chunk_queries
from megakernel.ops.dispatch import choose
from megakernel.ops.documents import Positions, token_positions, window_reach
from megakernel.ops.groups import scan_groups
from megakernel.ops.mixture import by_component, first_key, pack_keys
from megakernel.ops.partial_output import merge_parts, normalized, with_ones
from megakernel.ops.tensors import Tensors, accum_dtype
from megakernel.ops.window import (
    LocalWindow,
    Tail,
    WindowLayout,
    softmax_pairs,
    unchunk_partial,
    window_inputs,
    window_layout,
    window_sums,
)

GROUP = 1024
"""Queries whose weights on landmarks are in memory at once; rounded down to a multiple of the block."""

MISSING = -(2**62)
"""`Landmarks.ends` of a block that does not exist."""


class Landmarks(NamedTuple):
    """S blocks of r landmarks each."""

    keys: Tensor
    """(B, H_kv, S, r, d), or M d with M keys per landmark."""

    values: Tensor
    """(B, H_kv, S, r, D)"""

    ends: Tensor
    """(B, S) int64: index of the block's last token relative to the first token of this shard, or MISSING."""

    def advanced(self, tokens: int) -> "Landmarks":
        """The landmarks relative to a shard that begins `tokens` later."""
        ends = self._ends()
        return self._replace(ends=torch.where(ends == MISSING, MISSING, ends - tokens))

    def appended_to(self, other: "Landmarks | None") -> "Landmarks":
        """`other` followed by these landmarks."""
        if other is None:
            return self
        keys, values = (torch.cat(both, 2) for both in zip(other[:2], self[:2]))
        return Landmarks(keys, values, torch.cat([other.ends.expand(len(keys), -1), self._ends()], 1))

    def carried(self, own: int, positions: Positions, tokens: int, size: int) -> "Landmarks":
        """These landmarks for the state after a shard's tokens: `advanced`, with one place for every `size` tokens.

        own: the shard's places, which are the last. A place without a block is dropped, or taken by the block after it,
        but one place always remains. Synchronizes with the GPU if positions are a tensor and the shard has one place,
        as in decoding.
        """
        kept, count = self, self.ends.shape[1]
        if isinstance(positions, int):
            # Only the shard's last places can be without a block. Before the document's first block ends, earlier
            # places are of other documents.
            start = count - own if positions < size else 0
            stop = count - own + (positions + tokens) // size - positions // size
            kept = self._places(start, max(stop, start + 1))
        elif own == 1 < count:
            before, last = self._places(count - 2, count - 1), self._places(count - 1, count)
            exists = last.ends != MISSING
            if not (exists & (before.ends != MISSING)).any():
                keys, values = (
                    torch.where(exists[:, None, :, None, None], *both) for both in zip(last[:2], before[:2])
                )
                merged = Landmarks(keys, values, torch.where(exists, last.ends, before.ends))
                kept = merged.appended_to(self._places(0, count - 2))
        return kept.advanced(tokens)

    def before(self, place: int) -> "Landmarks":
        """The landmarks of the first `place` places."""
        return self._places(0, place)

    def _places(self, start: int, stop: int) -> "Landmarks":
        return Landmarks(
            self.keys[:, :, start:stop], self.values[:, :, start:stop], self._ends()[:, start:stop]
        )

    def _ends(self) -> Tensor:
        return self.ends.expand(len(self.keys), -1)


class Blocks(NamedTuple):
    """The blocks that end in each of S chunks of b tokens, at most one per chunk."""

    layout: WindowLayout
    ends: Tensor
    """(B, S) as in `Landmarks`."""

    start: Tensor
    """(B, S): index of the block's first token in the window of its chunk."""

    def last_positions(self) -> Tensor:
        """(B, S): position of the block's last token in its document; arbitrary for missing blocks."""
        at = self.start - self.layout.halo + self.layout.block_size - 1
        return self.layout.positions.gather(-1, at[..., None])[..., 0]

    def gather(self, before: Tensor, x: Tensor) -> Tensor:
        """The tokens of each block (B, H, S, b, d), from the tail (B, H, tail, d) and the tokens x (B, H, N, d)."""
        windows = self.layout.windows(before, x)
        if self.layout.aligned:
            return windows
        inside = torch.arange(self.layout.block_size, device=x.device)
        index = (self.start[..., None] + inside).clamp(min=0)[:, None, :, :, None]
        return windows.gather(3, index.expand(*windows.shape[:3], -1, windows.shape[-1]))


def complete_blocks(positions: Positions, length: int, device: torch.device, size: int) -> Blocks:
    """The blocks of `size` tokens that end among `length` tokens."""
    layout = window_layout(positions, length, device, block_size=size, blocks=1)
    ended = layout.block_ends()
    at = ended.int().argmax(-1)
    ends = at + torch.arange(at.shape[1], device=device) * layout.size
    return Blocks(layout, torch.where(ended.any(-1), ends, MISSING), layout.halo + at - size + 1)


class LandmarkVisibility(NamedTuple):
    """The landmarks that each query sees: those of blocks that end at an index in [first, limit)."""

    first: Tensor
    """(B, N): index of the first token of the query's document."""

    limit: Tensor
    """(B, N): exclusive limit of the blocks' ends."""

    def visible(self, ends: Tensor, rank: int) -> Tensor:
        """(B, N, S r) bool: whether the query sees the landmark."""
        visible = (ends[:, None] >= self.first[..., None]) & (ends[:, None] < self.limit[..., None])
        return visible.repeat_interleave(rank, -1)


def landmark_visibility(
    positions: Positions, length: int, device: torch.device, *, size: int, skipped: int
) -> LandmarkVisibility:
    """Visibility of blocks that end before the query's current block of `size` tokens and the `skipped` - 1 before."""
    in_document = token_positions(positions, length, device)
    in_shard = torch.arange(length, device=device)
    return LandmarkVisibility(in_shard - in_document, in_shard - window_reach(in_document, size, skipped))


class LandmarkInputs(NamedTuple):
    """Validated arguments of a backend other than queries, keys and values; see `landmark_attention`."""

    landmarks: Landmarks
    visibility: LandmarkVisibility
    token_count: float
    far_weight: Tensor | None
    window: LocalWindow
    tail: Tail
    priors: Tensor | None
    shift: Tensor | None
    gate: Tensor | None
    positions: Positions


def landmark_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    landmarks: Landmarks,
    visibility: LandmarkVisibility,
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
    """Softmax attention to the window and to all visible landmarks; quadratic in their number.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv; (B, H_kv, M, N, d) with priors and no shift.
        v: (B, H_kv, N, D).
        landmarks: of all blocks that a query may see, from all shards.
        visibility: the landmarks that each query sees.
        window: the tokens that each query sees.
        tail: at least the window.block_size * window.blocks tokens before these.
        token_count: the landmark token count.
        priors: pi (H_kv, M) >= 0 of mixture keys: tokens and landmarks weigh sum_r pi_r exp(q.k_r / sqrt(d)).
        shift: b (H_kv, M, d), only with priors: the keys of a token are k + b_r; landmark keys are already shifted.
        far_weight: gamma (H,), multiplies landmarks by exp(gamma) under the shared normalizer; None: 0.
        gate: logits of the window's share, broadcastable to (B, H, N); window and landmarks then have separate
            normalizers. None: one normalizer for both.
        positions: (B, N) positions within documents, or the position of the first token if each sequence holds one
            document.
        backend: reference or chunked.

    Returns:
        (B, H, N, D) in the dtype of v. Queries that see no landmark attend to the window alone.

    Raises:
        ValueError: invalid shapes, dtypes or devices; the message names the argument.
    """
    check_heads(q, first_key(k, priors, shift), v)
    check_positions(positions, q)
    check_per_head("far_weight", far_weight, q.shape[1])
    k = pack_keys(k)
    check_cached("tail", tail, k, v, max(tail.keys.shape[2], window.block_size * window.blocks))
    if gate is not None:
        gate = expand_tokens("gate", gate, q)
    far = (landmarks, visibility, token_count, far_weight)
    inputs = LandmarkInputs(*far, window, tail, priors, shift, gate, positions)
    return choose(IMPLEMENTATIONS, backend)(q, k, v, inputs)


def chunked(q: Tensor, k: Tensor, v: Tensor, inputs: LandmarkInputs) -> Tensor:
    """Windows in linear time; landmarks for GROUP queries at a time to bound memory."""
    landmarks, visibility, token_count, far_weight, window, tail, priors, shift, gate, positions = inputs
    rank, ends = landmarks.keys.shape[3], landmarks.ends

    def on_group(positions: Positions, carry: Tensors, sequences: Tensors, shared: Tensors):
        q, k, v, gate, first, limit = sequences
        keys, values, far_weight, priors, shift = shared
        tail, heads, length, kv_heads = Tail(*carry), q.shape[1], q.shape[2], k.shape[1]
        near = window_sums(q, k, v, tail, positions, window, priors, shift)
        far_q = q.to(accum_dtype(q.dtype))
        if window.far_rotary:
            far_q = window.far_rotary(far_q, token_positions(positions, length, q.device))
        queries = chunk_queries(far_q, kv_heads, length)
        visible = LandmarkVisibility(first[:, 0], limit[:, 0]).visible(ends, rank)[:, None]
        far = unchunk_partial(softmax_pairs(queries, keys, values, visible, priors), heads, length)
        if far_weight is not None:
            far = far._replace(values=far.values * torch.exp(far_weight)[:, None, None])
        share = None
        if gate is not None:
            # Exactly the window alone if no landmark is visible.
            share = torch.where(visible.any(-1), torch.sigmoid(gate.to(near.values.dtype)), 1.0)
        (out,) = merge_parts(near, far, share, lambda sums: (normalized(sums),))
        return (out.to(v.dtype),), tuple(tail.after(k, v))

    dtype = accum_dtype(q.dtype)
    keys = landmarks.keys.to(dtype).flatten(2, 3)[:, :, None]
    values = with_ones(landmarks.values.to(dtype).flatten(2, 3), token_count)[:, :, None]
    far_weight = None if far_weight is None else far_weight.to(dtype)
    sequences = (q, k, v, gate, visibility.first[:, None], visibility.limit[:, None])
    group = window.block_size * max(1, GROUP // window.block_size)
    shared = (keys, values, far_weight, priors, shift)
    (out,), _ = scan_groups(on_group, tuple(tail), sequences, shared, group=group, positions=positions)
    return out


def reference(q: Tensor, k: Tensor, v: Tensor, inputs: LandmarkInputs) -> Tensor:
    """From the formula, query by query."""
    landmarks, visibility, token_count, far_weight, window, tail, priors, shift, gate, positions = inputs
    batch, heads, length, width = q.shape
    group, dtype, rank = heads // k.shape[1], accum_dtype(q.dtype), landmarks.keys.shape[3]
    positions_in_document = token_positions(positions, length, q.device)
    far_q = q.to(dtype)
    near_q, past, keys = window_inputs(q, k, tail, positions, window, shift)
    if window.far_rotary:
        far_q = window.far_rotary(far_q, positions_in_document)
    keys = torch.cat([past, keys], 2).repeat_interleave(group, 1)
    values = torch.cat([tail.values, v], 2).to(dtype).repeat_interleave(group, 1)
    far_keys, far_values = (x.to(dtype).repeat_interleave(group, 1).flatten(2, 3) for x in landmarks[:2])
    keys, shares = by_component(keys, priors, width)
    far_keys, _ = by_component(far_keys, priors, width)
    ends = landmarks.ends.expand(batch, -1).tolist()
    first, limit = (x.expand(batch, -1).tolist() for x in visibility)
    log_count = torch.log(torch.tensor(token_count, dtype=dtype)) + (
        0.0 if far_weight is None else far_weight[:, None, None]
    )

    outputs = []
    for b, row in enumerate(positions_in_document.expand(batch, -1).tolist()):
        for i, position in enumerate(row):
            oldest = max(0, (position // window.block_size - window.blocks + 1) * window.block_size)
            index = past.shape[2] + i
            tokens = slice(index - (position - oldest), index + 1)
            scores = keys[:, b, :, tokens] @ near_q[b, :, i, :, None] * width**-0.5
            blocks = [s for s, end in enumerate(ends[b]) if first[b][i] <= end < limit[b][i]]
            far = [s * rank + landmark for s in blocks for landmark in range(rank)]
            far_scores = far_keys[:, b][:, :, far] @ far_q[b, :, i, :, None] * width**-0.5 + log_count
            # The maximum of all scores cancels in the quotient.
            largest = torch.cat([scores, far_scores], 2).detach().amax((0, 2), keepdim=True)
            weights, far_weights = ((shares * torch.exp(x - largest)).sum(0) for x in (scores, far_scores))
            share = None if gate is None or not blocks else torch.sigmoid(gate[b, :, i, None].to(dtype))
            outputs.append(_mean(weights, far_weights, values[b, :, tokens], far_values[b][:, far], share))
    out = torch.stack(outputs).view(batch, length, heads, -1).transpose(1, 2)
    return out.to(v.dtype)


def _mean(near: Tensor, far: Tensor, values: Tensor, far_values: Tensor, share: Tensor | None) -> Tensor:
    """Output (H, D) from weights (H, W, 1) and values (H, W, D) of tokens, and the same of landmarks."""
    near_sum, far_sum = (near * values).sum(1), (far * far_values).sum(1)
    if share is None:
        return (near_sum + far_sum) / (near.sum(1) + far.sum(1))
    return share * near_sum / near.sum(1) + (1 - share) * far_sum / far.sum(1)


IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}
"""Backend -> implementation."""

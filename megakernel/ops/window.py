"""Local windows: the exact part of local and FLuRKA attention.

Blocks of b tokens restart at every document. A token sees the tokens up to itself of its current block, or also of the
previous block. The sequence is split into chunks of L tokens regardless of document boundaries; each chunk has one
window of keys, its own tokens and the `halo` before them, with a mask. No keys are gathered.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.chunks import chunk_queries, unchunk_queries
from megakernel.ops.documents import Positions, ends_block, pad_positions, token_positions, window_reach
from megakernel.ops.mixture import Rotation, merged_components, shifted, unpack_components
from megakernel.ops.partial_output import PartialOutput, normalized, with_ones
from megakernel.ops.state import EMPTY
from megakernel.ops.tensors import accum_dtype


class Tail(NamedTuple):
    """The last b * blocks tokens before a shard of the sequence, in which a block that ends in the shard may begin."""

    keys: Tensor
    """(B, H_kv, b blocks, d), or M d with M keys per position; not rotated, and arbitrary before the start of the
    current document."""

    values: Tensor
    """(B, H_kv, b blocks, D)"""

    def after(self, k: Tensor, v: Tensor) -> "Tail":
        """The tail after the tokens k and v."""
        count = self.keys.shape[2]
        return Tail(
            torch.cat([self.keys[:, :, k.shape[2] :], k[:, :, -count:]], 2),
            torch.cat([self.values[:, :, v.shape[2] :], v[:, :, -count:]], 2),
        )

    def and_token(self, k: Tensor, v: Tensor) -> "Tail":
        """The tail with one more token appended, for `token_window`."""
        return Tail(torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2))

    @property
    def without_oldest(self) -> "Tail":
        """The tail without its first token."""
        return Tail(self.keys[:, :, 1:], self.values[:, :, 1:])


def empty_tail(k: Tensor, v: Tensor, count: int) -> Tail:
    """The tail before the first token."""
    return Tail(k.new_zeros(*k.shape[:2], count, k.shape[3]), v.new_zeros(*v.shape[:2], count, v.shape[3]))


class LocalWindow(NamedTuple):
    """The local window of a token: its current block of b tokens, and with blocks=2 also the previous block."""

    block_size: int
    blocks: int
    rotary: Rotation | None
    """Rotates queries and keys, which may be packed mixture keys."""

    far_rotary: Rotation | None = None
    """Rotates queries for their products with landmarks, which are already rotated; None if landmarks are not."""


class WindowLayout(NamedTuple):
    """The chunks and windows of a group of tokens."""

    block_size: int
    blocks: int
    size: int
    """L, tokens per chunk."""

    halo: int
    """Tokens of a window before its chunk."""

    length: int
    """Tokens of the group; the last chunks may hold fewer than L."""

    positions: Tensor
    """(B, C, L) positions of the tokens in their documents; B is 1 if all sequences have the same."""

    runs: int
    """Chunks per chunk of the far scan; C is a multiple."""

    aligned: bool
    """Whether chunks coincide with blocks."""

    def windows(self, before: Tensor, x: Tensor) -> Tensor:
        """Windows (B, H, C, halo + L, d) from the tail (B, H, tail, d) and the tokens x (B, H, T, d)."""
        # F.pad and torch.cat copy even if there is nothing to add.
        if missing := self.positions.shape[1] * self.size - x.shape[2]:
            x = F.pad(x, (0, 0, 0, missing))
        if not self.halo:
            return x.unflatten(2, (-1, self.size))
        x = torch.cat([before.narrow(2, before.shape[2] - self.halo, self.halo), x], 2)
        if self.positions.shape[1] == 1:
            return x[:, :, None]
        # Not `unfold`, whose backward is slow. With several chunks, the halo is a whole number of them.
        chunks = x.unflatten(2, (-1, self.size))
        count = self.positions.shape[1]
        return torch.cat([chunks.narrow(2, first, count) for first in range(chunks.shape[2] - count + 1)], 3)

    def block_ends(self) -> Tensor:
        """(B, C, L) bool: `ends_block` of each token, False for padding."""
        real = torch.arange(self.positions[0].numel(), device=self.positions.device) < self.length
        return ends_block(self.positions, self.block_size, self.blocks) & real.view_as(self.positions[0])

    def visible(self) -> Tensor:
        """(B, C, L, halo + L) bool: whether the token sees this key of its window."""
        reach = window_reach(self.positions, self.block_size, self.blocks)
        queries = torch.arange(self.halo, self.halo + self.size, device=reach.device)
        keys = torch.arange(self.halo + self.size, device=reach.device)
        return (keys <= queries[:, None]) & (keys >= (queries - reach)[..., None])


def window_layout(
    positions: Positions, length: int, device: torch.device, *, block_size: int, blocks: int, runs: int = 1
) -> WindowLayout:
    """The layout of `length` tokens, padded to a multiple of `runs` chunks, or to whole chunks if these are fewer."""
    aligned = isinstance(positions, int) and positions % block_size == 0 and length >= block_size
    size = min(block_size, length)
    runs = min(runs, -(-length // size))
    at = token_positions(positions, length, device)
    chunk_positions = pad_positions(at, -length % (runs * size)).unflatten(1, (-1, size))
    halo = (blocks - 1) * block_size if aligned else blocks * block_size
    return WindowLayout(block_size, blocks, size, halo, length, chunk_positions, runs, aligned)


def rotate_keys(rotary: Rotation, tail: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`tail` and `k` rotated; `positions` (B, N) are those of k, and the tail's tokens are right before the first."""
    count = tail.shape[2]
    before = positions[:, :1] - torch.arange(count, 0, -1, device=k.device)
    both = rotary(torch.cat([tail, k], 2), torch.cat([before, positions], 1))
    return both.narrow(2, 0, count), both.narrow(2, count, k.shape[2])


class TokenWindow(NamedTuple):
    """The window of a single token, which is the last of its W keys."""

    keys: Tensor
    """(B, H_kv, W, d) as in a `Tail`."""

    values: Tensor
    """(B, H_kv, W, D)"""

    visible: Tensor | None
    """(B, W) bool; None: all are visible."""

    def softmax(
        self, q: Tensor, rotary: Rotation | None, priors: Tensor | None, shift: Tensor | None
    ) -> PartialOutput:
        """Sums (B, H_kv, 1, G, D + 1) of unrotated queries (B, H, 1, d); all tensors in float32 or better."""
        visible = None if self.visible is None else self.visible[:, None, None]
        queries = chunk_queries(q, self.keys.shape[1], 1)
        keys, values = self._prepared_keys(rotary, shift)[:, :, None], with_ones(self.values)[:, :, None]
        if visible is None and priors is not None:
            visible = torch.ones(1, 1, 1, keys.shape[3], dtype=torch.bool, device=keys.device)
        return softmax_pairs(queries, keys, values, visible, priors)

    def softmax_mean(
        self, q: Tensor, rotary: Rotation | None, priors: Tensor | None, shift: Tensor | None
    ) -> Tensor:
        """`softmax`, normalized: (B, H, 1, D)."""
        if priors is not None:
            return unchunk_queries(normalized(self.softmax(q, rotary, priors, shift)), q.shape[1], 1)
        mask = None if self.visible is None else self.visible[:, None, None]
        grouped = q.shape[1] != self.keys.shape[1]
        keys = self._prepared_keys(rotary, shift)
        return F.scaled_dot_product_attention(q, keys, self.values, attn_mask=mask, enable_gqa=grouped)

    def _prepared_keys(self, rotary: Rotation | None, shift: Tensor | None) -> Tensor:
        keys = shifted(self.keys, shift)
        return rotary.relative_to_last(keys) if rotary else keys


def token_window(
    tail: Tail, positions: Positions, block_size: int, blocks: int, dtype: torch.dtype
) -> TokenWindow:
    """The window, in `dtype`, of the last token of `tail`, which has `positions`; at least b * blocks + 1 tokens."""
    keys, values, visible = *tail, None
    if isinstance(positions, int):
        reach = min(positions, positions % block_size + (blocks - 1) * block_size)
        keys, values = keys[:, :, -reach - 1 :], values[:, :, -reach - 1 :]
    else:
        back = torch.arange(keys.shape[2] - 1, -1, -1, device=keys.device)
        visible = back <= window_reach(positions, block_size, blocks)
    return TokenWindow(keys.to(dtype), values.to(dtype), visible)


def window_inputs(
    q: Tensor, k: Tensor, tail: Tail, positions: Positions, window: LocalWindow, shift: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, tail keys and keys for the window: shifted and rotated, in float32 or better."""
    queries = q.to(accum_dtype(q.dtype))
    past, keys = (shifted(x.to(queries.dtype), shift) for x in (tail.keys, k))
    if window.rotary:
        at = token_positions(positions, q.shape[2], q.device)
        queries = window.rotary(queries, at)
        past, keys = rotate_keys(window.rotary, past, keys, at)
    return queries, past, keys


def softmax_pairs(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, priors: Tensor | None = None
) -> PartialOutput:
    """Sums over windows with weights exp(q.k / sqrt(d)), or sum_r pi_r exp(q.k_r / sqrt(d)) for mixture keys.

    queries: (B, H_kv, C, G L, d); keys: (B, H_kv, C, W, d), or (B, H_kv, C, W, M d) with priors pi (H_kv, M); values:
    (B, H_kv, C, W, D + 1); visible: (B, C, L, W), or None (only without priors) if queries see all keys.
    """
    mask = None if visible is None else visible[:, None]
    if priors is not None:
        assert mask is not None
        keys, mask = unpack_components(keys, mask, priors)
    scores = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(-1, -2)
    if mask is not None:
        scores = scores.unflatten(3, (-1, mask.shape[3]))
        scores = scores.masked_fill(~mask[:, :, :, None], -torch.inf).flatten(3, 4)
    log_scale = scores.detach().amax(-1).clamp(min=EMPTY)
    weights = torch.exp(scores - log_scale[..., None])
    if priors is not None:
        weights = merged_components(weights, priors)
    return PartialOutput(weights @ values, log_scale)


def window_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tail: Tail,
    positions: Positions,
    window: LocalWindow,
    priors: Tensor | None,
    shift: Tensor | None,
) -> PartialOutput:
    """Softmax sums (B, H, N, D + 1) of queries (B, H, N, d) over the windows of their tokens.

    k, v: packed as in `tail`, the tokens before them; other arguments as in `window_attention`.
    """
    heads, length, dtype = q.shape[1], q.shape[2], accum_dtype(q.dtype)
    if length == 1:
        last = token_window(tail.and_token(k, v), positions, window.block_size, window.blocks, dtype)
        return unchunk_partial(last.softmax(q.to(dtype), window.rotary, priors, shift), heads, 1)
    layout = window_layout(positions, length, q.device, block_size=window.block_size, blocks=window.blocks)
    queries, past, keys = window_inputs(q, k, tail, positions, window, shift)
    chunks, size = layout.positions.shape[1:]
    sums = softmax_pairs(
        chunk_queries(queries, k.shape[1], size, chunks),
        layout.windows(past, keys),
        with_ones(layout.windows(tail.values.to(dtype), v.to(dtype))),
        layout.visible(),
        priors,
    )
    return unchunk_partial(sums, heads, length)


def unchunk_partial(sums: PartialOutput, heads: int, length: int) -> PartialOutput:
    """Sums (B, H, N, D + 1) from sums of chunked queries."""
    return PartialOutput(*(unchunk_queries(x, heads, length) for x in (sums.values, sums.scale_or_zero)))

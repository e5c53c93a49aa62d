"""Windows by tiles, and chosen blocks by the queries that read them: linear time and memory.

A query's blocks are its own, so gathering them would read k b keys per query. Instead every block meets all queries
that chose it in one product, and two passes give all parts one normalizer.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.ring import FollowingGradients, Ring, visits
from megakernel.ops.selected_attention.readers import Readers, numbers_at_once, readers_of
from megakernel.ops.selected_attention.tiles import BlockReads, Tiles
from megakernel.ops.state import EMPTY


def attention_by_block(
    near_queries: Tensor,
    queries: Tensor,
    near_keys: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tiles,
    ring: Ring | None = None,
) -> Tensor:
    """Outputs (B, H, N, D) in the dtype of the queries, which is float32 or better.

    near_queries, queries: (B, H, N, d), for keys of the window and of chosen blocks; near_keys, keys: (B, H_kv, T, d);
    values: (B, H_kv, T, D). ring: passes on keys and values of the shards that hold the blocks.
    """
    kv_heads, length = keys.shape[1], queries.shape[2]
    near_rows, rows = (_by_tile(x, kv_heads, tiles) for x in (near_queries, queries))
    out: Tensor = _Attend.apply(near_rows, rows, near_keys, keys, values, tiles, ring)
    return out.flatten(2, 3).movedim(3, 2).flatten(1, 2)[:, :, :length]


def _by_tile(x: Tensor, kv_heads: int, tiles: Tiles) -> Tensor:
    """(B, H, N, d) -> (B, H_kv, C, L, G, d), padded with zeros."""
    count, size = tiles.layout.positions.shape[1:]
    x = F.pad(x, (0, 0, 0, count * size - x.shape[2])).unflatten(2, (count, size))
    return x.unflatten(1, (kv_heads, -1)).movedim(2, 4).contiguous()


class _Attend(torch.autograd.Function):
    """Saves the normalizer of each query; backward gathers the keys again. Queries as `_by_tile` makes them."""

    @staticmethod
    def forward(ctx, near_queries, queries, near_keys, keys, values, tiles, ring):
        group = queries.shape[4]
        out = queries.new_empty(*queries.shape[:-1], values.shape[-1])
        normalizer = queries.new_empty(queries.shape[:-1])
        for at, _, window in _windows(tiles, near_keys, values, group):
            scores = window.scores(near_queries[:, :, at].flatten(3, 4))
            total = scores.logsumexp(-1, keepdim=True).clamp_(min=EMPTY)
            out[:, :, at] = (scores.sub_(total).exp_() @ window.values).view_as(out[:, :, at])
            normalizer[:, :, at] = total.view_as(normalizer[:, :, at])
        blocks = None
        for blocks, _ in _blocks_of_shards(tiles, keys, values, ring):
            if blocks is not None:
                normalizer = _add_blocks(out, normalizer, queries, blocks)
        ctx.save_for_backward(near_queries, queries, near_keys, keys, values, out, normalizer)
        ctx.tiles, ctx.ring = tiles, ring
        ctx.blocks = blocks if ring is None else None
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        near_queries, queries, near_keys, keys, values, out, normalizer = ctx.saved_tensors
        group, grad = queries.shape[4], grad.contiguous()
        delta = (out * grad).sum(-1)
        dnear_queries = torch.empty_like(near_queries)
        dqueries, dnear_keys, dnear_values = map(torch.zeros_like, (queries, near_keys, values))
        for at, index, window in _windows(ctx.tiles, near_keys, values, group):
            given = (near_queries, grad, normalizer[..., None], delta[..., None])
            parts = window.gradients(*(x[:, :, at].flatten(3, 4) for x in given))
            dnear_queries[:, :, at] = parts[0].view_as(dnear_queries[:, :, at])
            for whole, part in zip((dnear_keys, dnear_values), parts[1:]):
                whole.index_add_(2, index.flatten(), part.flatten(2, 3))
        following = FollowingGradients(ctx.ring)
        shards = _blocks_of_shards(ctx.tiles, keys, values, ctx.ring)
        for blocks, held in shards if ctx.ring else [(ctx.blocks, (keys, values))]:
            gradients = tuple(map(torch.zeros_like, held))
            if blocks is not None:
                _add_gradients(dqueries, gradients, queries, grad, normalizer, delta, blocks)
            following.add(gradients)
        dkeys, dvalues = following.returned()
        return dnear_queries, dqueries, dnear_keys, dkeys, dnear_values.add_(dvalues), None, None


def _add_blocks(out: Tensor, normalizer: Tensor, queries: Tensor, blocks: "_Blocks") -> Tensor:
    """Add what queries read of some blocks to `out`, in place; returns the new normalizers."""
    group, rows = queries.shape[4], queries.view(-1, *queries.shape[4:])
    of_pairs = rows.new_full((blocks.lists.numel() + 1, group), -torch.inf)
    for readers, read in blocks.pieces(group):
        scores = read.scores(rows[readers.queries].flatten(1, 2))
        of_pairs[readers.pairs] = scores.logsumexp(-1).view(*readers.pairs.shape, group)
    both = torch.logaddexp(normalizer, of_pairs[:-1].view(*queries.shape[:4], -1, group).logsumexp(4))
    out *= (normalizer - both).exp_()[..., None]
    sums, totals = out.view(len(rows), -1), both.view(len(rows), group)
    for readers, read in blocks.pieces(group):
        scores = read.scores(rows[readers.queries].flatten(1, 2))
        weights = scores.sub_(totals[readers.queries].flatten(1)[..., None]).exp_()
        sums.index_add_(0, readers.queries.flatten(), (weights @ read.values).view(-1, sums.shape[1]))
    return both


def _add_gradients(
    dqueries: Tensor,
    gradients: tuple[Tensor, ...],
    queries: Tensor,
    grad: Tensor,
    normalizer: Tensor,
    delta: Tensor,
    blocks: "_Blocks",
) -> None:
    """Add the gradients of queries, and of the keys and values that hold these blocks, in place."""
    group = queries.shape[4]
    given = [x.view(-1, *x.shape[4:]) for x in (queries, grad, normalizer[..., None], delta[..., None])]
    drows = dqueries.view(len(given[0]), -1)
    dblocks = tuple(map(torch.zeros_like, (blocks.keys, blocks.values)))
    for readers, read in blocks.pieces(group):
        part, *others = read.gradients(*(x[readers.queries].flatten(1, 2) for x in given))
        drows.index_add_(0, readers.queries.flatten(), part.view(-1, drows.shape[1]))
        for whole, block in zip(dblocks, others):
            whole.index_add_(0, readers.items, block)
    for whole, block in zip(gradients, dblocks):
        blocks.add_to(whole, block)


def _blocks_of_shards(
    tiles: Tiles, keys: Tensor, values: Tensor, ring: Ring | None
) -> "Iterator[tuple[_Blocks | None, tuple[Tensor, ...]]]":
    """The blocks of every shard, this one first, and its keys and values; None: nothing is read there."""
    for source, held in visits(ring, (keys, values)):
        rank = 0 if ring is None else ring.rank
        if source > rank:
            yield None, held
            continue
        reads = tiles.reads(tiles.layout.positions[0].numel(), source, rank)
        keys, values = held
        yield _Blocks.of(reads, keys, values, trimmed=ring is not None), held


class _Read(NamedTuple):
    """Keys (..., W, d) and values (..., W, D) that M queries read, and (..., M, W or 1) bool: whether they see them."""

    keys: Tensor
    values: Tensor
    visible: Tensor

    def scores(self, rows: Tensor) -> Tensor:
        """q.k / sqrt(d) (..., M, W) of queries (..., M, d), -inf where the query does not see the key."""
        scores = (rows @ self.keys.transpose(-1, -2)).mul_(rows.shape[-1] ** -0.5)
        return scores.masked_fill_(~self.visible, -torch.inf)

    def gradients(
        self, rows: Tensor, douts: Tensor, normalizer: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries (..., M, d), keys and values; normalizer and delta = o.do: (..., M, 1)."""
        weights = self.scores(rows).sub_(normalizer).exp_()
        dscores = (douts @ self.values.transpose(-1, -2)).sub_(delta).mul_(weights)
        dscores.mul_(rows.shape[-1] ** -0.5)
        return dscores @ self.keys, dscores.transpose(-1, -2) @ rows, weights.transpose(-1, -2) @ douts


def _windows(tiles: Tiles, keys: Tensor, values: Tensor, group: int) -> Iterator[tuple[slice, Tensor, _Read]]:
    """A few tiles at a time, indices (c, W) of their keys, and what their L G queries read: keys (B, H_kv, c, W, d)."""
    layout, width = tiles.layout, keys.shape[-1] + values.shape[-1]
    keys_of_tile = layout.halo + layout.size
    numbers = keys.shape[:2].numel() * keys_of_tile * (width + 2 * layout.size * group)
    count = max(1, numbers_at_once(keys) // numbers)
    for start in range(0, tiles.number, count):
        at = slice(start, min(start + count, tiles.number))
        index, visible = tiles.windows(at)
        visible = visible.repeat_interleave(group, 2)[:, None]
        yield at, index, _Read(keys[:, :, index], values[:, :, index], visible)


class _Blocks(NamedTuple):
    """The blocks of all B H_kv key heads, and who reads them."""

    lists: Tensor
    """(B H_kv, C L, k')"""

    tokens: Tensor
    """(B, S, b) int64: the blocks' tokens among the T of a sequence; any for a block that does not exist."""

    keys: Tensor
    """(B H_kv S, b, d)"""

    values: Tensor
    """(B H_kv S, b, D)"""

    readers: Readers

    groups: int
    """How many groups of readers there can be."""

    @classmethod
    def of(cls, reads: BlockReads, keys: Tensor, values: Tensor, trimmed: bool) -> "_Blocks | None":
        """From keys (B, H_kv, T, d) and values (B, H_kv, T, D); None if there is no block to choose.

        trimmed: without groups of readers that do not exist, of which the host has to ask the number: most do not where
        queries read the blocks of all shards, and these are one's.
        """
        lists = reads.lists.flatten(0, 1)
        index = reads.starts[..., None] + torch.arange(reads.block_size, device=keys.device)
        if not lists.shape[-1]:
            return None
        keys, values = (_take_blocks(x, index) for x in (keys, values))
        readers = readers_of(lists, index.shape[1])
        groups = max(1, int(readers.ends[-1])) if trimmed else len(readers.items)
        return cls(lists, index, keys, values, readers, groups)

    def pieces(self, group: int) -> Iterator[tuple[Readers, _Read]]:
        """A few groups of readers at a time, and what their R G queries read: keys (j, b, d)."""
        size, width = self.keys.shape[1], self.keys.shape[2] + self.values.shape[2]
        rows = self.readers.queries.shape[1] * group
        count = max(1, numbers_at_once(self.keys) // (rows * (width + 2 * size) + size * width))
        for start in range(0, self.groups, count):
            readers = self.readers.some(slice(start, start + count))
            visible = readers.exists.repeat_interleave(group, 1)[..., None]
            yield readers, _Read(self.keys[readers.items], self.values[readers.items], visible)

    def add_to(self, whole: Tensor, blocks: Tensor) -> None:
        """Add (B H_kv S, b, d) to the blocks' tokens of (B, H_kv, T, d), in place."""
        parts = blocks.view(*whole.shape[:2], -1, whole.shape[-1])
        index = self.tokens.flatten(1)[:, None, :, None].expand_as(parts)
        whole.scatter_add_(2, index, parts)


def _take_blocks(x: Tensor, index: Tensor) -> Tensor:
    """x (B, H_kv, T, d) at index (B, S, b): (B H_kv S, b, d)."""
    at = index.flatten(1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return x.gather(2, at).view(-1, index.shape[2], x.shape[-1])

"""Tiles of queries that gather the keys of their windows and of their chosen blocks: linear time and memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.selected_attention.tiles import Tiles
from megakernel.ops.state import EMPTY

GATHERED = 16_384
"""Keys of a key head that are gathered at once."""


def gathered_attention(
    near_queries: Tensor, queries: Tensor, near_keys: Tensor, keys: Tensor, values: Tensor, tiles: Tiles
) -> Tensor:
    """Outputs (B, H_kv, C, G L, D) of C tiles of L queries, in the dtype of the queries.

    near_queries, queries: (B, H_kv, C, G L, d), for keys of the window and of chosen blocks; near_keys, keys:
    (B, H_kv, T, d); values: (B, H_kv, T, D). All in float32 or better.
    """
    out: Tensor = _Attend.apply(near_queries, queries, near_keys, keys, values, tiles)
    return out


class _Attend(torch.autograd.Function):
    """Saves the log-sum-exp of each query; backward gathers the keys again."""

    @staticmethod
    def forward(ctx, near_queries, queries, near_keys, keys, values, tiles):
        out = queries.new_empty(*queries.shape[:-1], values.shape[-1])
        normalizer = queries.new_empty(queries.shape[:-1])
        for at in _groups(tiles):
            read = _Read.of(tiles, at, near_keys, keys, values)
            scores = read.scores(near_queries[:, :, at], queries[:, :, at])
            top = scores.amax(-1, keepdim=True).clamp(min=EMPTY)
            weights = scores.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
            out[:, :, at] = (weights @ read.values).div_(total)
            normalizer[:, :, at] = (top + total.log())[..., 0]
        ctx.save_for_backward(near_queries, queries, near_keys, keys, values, out, normalizer)
        ctx.tiles = tiles
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        near_queries, queries, near_keys, keys, values, out, normalizer = ctx.saved_tensors
        dnear_queries, dqueries = torch.empty_like(near_queries), torch.empty_like(queries)
        dnear_keys, dkeys, dvalues = (torch.zeros_like(x) for x in (near_keys, keys, values))
        for at in _groups(ctx.tiles):
            read = _Read.of(ctx.tiles, at, near_keys, keys, values)
            near_rows, rows, douts = (x[:, :, at] for x in (near_queries, queries, grad))
            weights = read.scores(near_rows, rows).sub_(normalizer[:, :, at, :, None]).exp_()
            delta = (out[:, :, at] * douts).sum(-1, keepdim=True)
            dscores = (douts @ read.values.transpose(-1, -2)).sub_(delta).mul_(weights)
            near, chosen = dscores.mul_(queries.shape[-1] ** -0.5).split(read.sizes, -1)
            dnear_queries[:, :, at] = near @ read.near_keys
            dqueries[:, :, at] = chosen @ read.chosen_keys
            near_weights, chosen_weights = weights.split(read.sizes, -1)
            read.add_near(dvalues, near_weights.transpose(-1, -2) @ douts)
            read.add_chosen(dvalues, chosen_weights.transpose(-1, -2) @ douts)
            read.add_near(dnear_keys, near.transpose(-1, -2) @ near_rows)
            read.add_chosen(dkeys, chosen.transpose(-1, -2) @ rows)
        return dnear_queries, dqueries, dnear_keys, dkeys, dvalues, None


def _groups(tiles: Tiles) -> list[slice]:
    """Tiles that are computed at once."""
    size = max(1, GATHERED // tiles.keys_of_tile)
    return [slice(start, min(start + size, tiles.number)) for start in range(0, tiles.number, size)]


class _Read(NamedTuple):
    """The keys that a few tiles read: W of their windows, and U b of the blocks in their lists."""

    near_index: Tensor
    """(C, W)"""

    chosen_index: Tensor
    """(B, H_kv, C, U b)"""

    near_visible: Tensor
    """(B, C, L, W) bool"""

    chosen_visible: Tensor
    """(B, H_kv, C, L or 1, U b) bool"""

    near_keys: Tensor
    """(B, H_kv, C, W, d)"""

    chosen_keys: Tensor
    """(B, H_kv, C, U b, d)"""

    values: Tensor
    """(B, H_kv, C, W + U b, D)"""

    @classmethod
    def of(cls, tiles: Tiles, at: slice, near_keys: Tensor, keys: Tensor, values: Tensor) -> "_Read":
        """Gather the keys of these tiles from (B, H_kv, T, d), and the values from (B, H_kv, T, D)."""
        near_index, near_visible = tiles.windows(at)
        lists = tiles.lists(at)
        chosen_index = tiles.keys_of(lists.indices)
        chosen_visible = lists.visible.repeat_interleave(tiles.selection.block_size, -1)
        both = torch.cat([values[:, :, near_index], _gather(values, chosen_index)], 3)
        near, chosen = near_keys[:, :, near_index], _gather(keys, chosen_index)
        return cls(near_index, chosen_index, near_visible, chosen_visible, near, chosen, both)

    @property
    def sizes(self) -> tuple[int, int]:
        """W and U b."""
        return self.near_keys.shape[3], self.chosen_keys.shape[3]

    def scores(self, near_queries: Tensor, queries: Tensor) -> Tensor:
        """q.k / sqrt(d) (B, H_kv, C, G L, W + U b), -inf where the query does not see the key."""
        size = self.near_visible.shape[2]
        near = (near_queries @ self.near_keys.transpose(-1, -2)).unflatten(3, (-1, size))
        near = near.masked_fill_(~self.near_visible[:, None, :, None], -torch.inf)
        chosen = (queries @ self.chosen_keys.transpose(-1, -2)).unflatten(3, (-1, size))
        chosen = chosen.masked_fill_(~self.chosen_visible[:, :, :, None], -torch.inf)
        return torch.cat([near, chosen], -1).flatten(3, 4).mul_(queries.shape[-1] ** -0.5)

    def add_near(self, total: Tensor, part: Tensor) -> None:
        """Add (B, H_kv, C, W, d) to the windows' keys of `total` (B, H_kv, T, d), in place."""
        total.index_add_(2, self.near_index.flatten(), part.flatten(2, 3))

    def add_chosen(self, total: Tensor, part: Tensor) -> None:
        """Add (B, H_kv, C, U b, d) to the listed blocks' keys of `total` (B, H_kv, T, d), in place."""
        rows = _rows(self.chosen_index, total.shape[2])
        total.view(-1, total.shape[-1]).index_add_(0, rows, part.reshape(-1, part.shape[-1]))


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """x (B, H_kv, T, d) at index (B, H_kv, C, n): (B, H_kv, C, n, d)."""
    rows = x.reshape(-1, x.shape[-1]).index_select(0, _rows(index, x.shape[2]))
    return rows.view(*index.shape, x.shape[-1])


def _rows(index: Tensor, total: int) -> Tensor:
    """Indices (B H_kv C n,) into the flattened tokens of all B H_kv sequences of `total` tokens."""
    sequences = torch.arange(index.shape[0] * index.shape[1], device=index.device)
    return (index.flatten(0, 1).flatten(1) + sequences[:, None] * total).flatten()

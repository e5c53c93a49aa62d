"""All keys with a mask: quadratic time, for short sequences and for tokens that each choose for themselves."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megakernel.ops.documents import window_reach
from megakernel.ops.selected_attention.inputs import NONE
from megakernel.ops.selected_attention.tiles import Tiles

ROWS = 512
"""Queries whose mask is in memory at once."""


def masked_attention(
    near_queries: Tensor, queries: Tensor, near_keys: Tensor, keys: Tensor, values: Tensor, tiles: Tiles
) -> Tensor:
    """Outputs (B, H, N, D) in the dtype of the queries.

    near_queries, queries: (B, H, N, d), for keys of the window and of chosen blocks, the same tensor if these are;
    near_keys, keys: (B, H_kv, T, d); values: (B, H_kv, T, D).
    """
    outputs = []
    for start in range(0, tiles.layout.length, ROWS):
        rows = slice(start, min(start + ROWS, tiles.layout.length))
        end = tiles.cached + rows.stop
        part = partial(_attend, tiles=tiles, rows=rows, same=queries is near_queries)
        tensors = [x[:, :, rows] for x in (near_queries, queries)]
        tensors += [x[:, :, :end] for x in (near_keys, keys, values)]
        if torch.is_grad_enabled():
            # Recomputed in backward: the masks of all queries are N x N.
            outputs.append(checkpoint(part, *tensors, use_reentrant=False))
        else:
            outputs.append(part(*tensors))
    return torch.cat(outputs, 2)


def _attend(
    near_queries: Tensor,
    queries: Tensor,
    near_keys: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tiles,
    rows: slice,
    same: bool,
) -> Tensor:
    near, chosen = _near(tiles, rows)[:, None], _chosen(tiles, rows, keys.shape[2])
    padding = tiles.layout.positions.flatten(1)[:, None, rows, None] < 0
    group, scale = queries.shape[1] // keys.shape[1], queries.shape[-1] ** -0.5
    if same:
        mask = near | chosen
    else:
        # One product of twice the width: a key is read by the query's rotated or by its unrotated half.
        mask = torch.cat([near.expand_as(chosen), chosen], -1)
        queries = torch.cat([near_queries, queries], -1)
        keys = torch.cat([F.pad(near_keys, (0, keys.shape[-1])), F.pad(keys, (near_keys.shape[-1], 0))], 2)
        values = torch.cat([values, values], 2)
    # Padding sees nothing, which SDPA does not define.
    mask = (mask | padding).repeat_interleave(group, 1) if group > 1 else mask | padding
    out = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=group > 1
    )
    return out.masked_fill(padding, 0.0)


def _near(tiles: Tiles, rows: slice) -> Tensor:
    """(B, n, keys) bool: whether a key is in the query's window."""
    positions = tiles.layout.positions.flatten(1)[:, rows]
    reach = window_reach(positions, tiles.selection.block_size, tiles.selection.near)
    queries = torch.arange(rows.start, rows.stop, device=reach.device) + tiles.cached
    keys = torch.arange(tiles.cached + rows.stop, device=reach.device)
    return (keys <= queries[:, None]) & (keys >= (queries - reach)[..., None])


def _chosen(tiles: Tiles, rows: slice, keys: int) -> Tensor:
    """(B, H_kv, n, keys) bool: whether a key is in a block that the query has chosen."""
    chosen, starts = tiles.of_queries(rows), tiles.starts
    count = starts.shape[1]
    members = torch.zeros(*chosen.shape[:3], count + 1, dtype=torch.bool, device=chosen.device)
    members.scatter_(-1, torch.where(chosen == NONE, count, chosen), True)
    members[..., count] = False
    # The block of every key; `count` for keys of none. Blocks that do not exist have no members.
    block_of = starts.new_full((len(starts), tiles.total), count)
    index = starts[..., None] + torch.arange(tiles.selection.block_size, device=starts.device)
    exists = tiles.ends >= tiles.selection.block_size - 1 - tiles.cached
    blocks = torch.where(exists, torch.arange(count, device=starts.device), count)
    block_of.scatter_reduce_(1, index.flatten(1), blocks[..., None].expand_as(index).flatten(1), "amin")
    return members.gather(-1, block_of[:, None, None, :keys].expand(*chosen.shape[:3], -1))

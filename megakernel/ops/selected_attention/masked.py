"""All keys with a mask: quadratic time, for short sequences and for tokens that each choose for themselves."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.documents import Positions, window_reach
from megakernel.ops.groups import scan_groups
from megakernel.ops.selected_attention.inputs import NONE
from megakernel.ops.selected_attention.tiles import Tiles
from megakernel.ops.tensors import Tensors

ROWS = 512
"""Queries whose mask is in memory at once."""


def masked_attention(
    near_queries: Tensor, queries: Tensor, near_keys: Tensor, keys: Tensor, values: Tensor, tiles: Tiles
) -> Tensor:
    """Outputs (B, H, N, D) in the dtype of the queries.

    near_queries, queries: (B, H, N, d), for keys of the window and of chosen blocks, the same tensor if these are;
    near_keys, keys: (B, H_kv, T, d); values: (B, H_kv, T, D).
    """
    same = queries is near_queries

    def on_group(start: Positions, carry: Tensors, sequences: Tensors, shared: Tensors):
        assert isinstance(start, int)
        near_rows, rows = sequences
        at = slice(start, start + near_rows.shape[2])
        near, chosen, seen = shared
        end = tiles.cached + at.stop
        chosen = None if chosen is None else chosen[:, :, :end]
        return (_attend(near_rows, rows, near[:, :, :end], chosen, seen[:, :, :end], tiles, at),), ()

    # Recomputed in backward: the masks of all queries are N x N.
    sequences, shared = (near_queries, None if same else queries), (near_keys, None if same else keys, values)
    (out,), _ = scan_groups(on_group, (), sequences, shared, group=ROWS)
    return out


def _attend(
    near_queries: Tensor,
    queries: Tensor | None,
    near_keys: Tensor,
    keys: Tensor | None,
    values: Tensor,
    tiles: Tiles,
    rows: slice,
) -> Tensor:
    """Outputs of the queries `rows`; queries and keys: None: those of the window."""
    near, chosen = _near(tiles, rows)[:, None], chosen_keys(tiles, rows, near_keys.shape[2])
    padding = tiles.layout.positions.flatten(1)[:, None, rows, None] < 0
    group, scale = near_queries.shape[1] // near_keys.shape[1], near_queries.shape[-1] ** -0.5
    mask = near | chosen
    if queries is not None and keys is not None:
        # One product of twice the width: a key is read by the query's rotated or by its unrotated half.
        mask = torch.cat([near.expand_as(chosen), chosen], -1)
        width = near_keys.shape[-1]
        near_queries = torch.cat([near_queries, queries], -1)
        near_keys = torch.cat([F.pad(near_keys, (0, width)), F.pad(keys, (width, 0))], 2)
        values = torch.cat([values, values], 2)
    # Padding sees nothing, which SDPA does not define.
    mask = (mask | padding).repeat_interleave(group, 1) if group > 1 else mask | padding
    out = F.scaled_dot_product_attention(
        near_queries, near_keys, values, attn_mask=mask, scale=scale, enable_gqa=group > 1
    )
    return out.masked_fill(padding, 0.0)


def _near(tiles: Tiles, rows: slice) -> Tensor:
    """(B, n, keys) bool: whether a key is in the query's window."""
    positions = tiles.layout.positions.flatten(1)[:, rows]
    reach = window_reach(positions, tiles.selection.block_size, tiles.selection.near)
    queries = torch.arange(rows.start, rows.stop, device=reach.device) + tiles.cached
    keys = torch.arange(tiles.cached + rows.stop, device=reach.device)
    return (keys <= queries[:, None]) & (keys >= (queries - reach)[..., None])


def chosen_keys(tiles: Tiles, rows: slice, keys: int) -> Tensor:
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

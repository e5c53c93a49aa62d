"""One token after its cache: it gathers its window and its chosen blocks, and reads nothing else."""

import torch
from torch import Tensor

from megakernel.ops.documents import token_positions, window_reach
from megakernel.ops.selected_attention.inputs import NONE, SelectedInputs
from megakernel.ops.selected_attention.tiles import Tiles
from megakernel.ops.tensors import accum_dtype


def attend(q: Tensor, k: Tensor, v: Tensor, inputs: SelectedInputs, tiles: Tiles) -> Tensor:
    """Output (B, H, 1, D) in float32 or better of queries (B, H, 1, d)."""
    selection, cache, dtype = inputs.selection, inputs.cache, accum_dtype(q.dtype)
    batch, kv_heads, group = len(k), k.shape[1], q.shape[1] // k.shape[1]
    at = token_positions(inputs.positions, 1, q.device).expand(batch, -1)
    # The cache has at least `reach` tokens, one more than a window needs beside its own.
    near_keys, near_values = (
        torch.cat([past[:, :, past.shape[2] - selection.reach + 1 :], own], 2).to(dtype)
        for past, own in zip(cache, (k, v))
    )
    back = torch.arange(selection.reach - 1, -1, -1, device=q.device)
    near_visible = (back <= window_reach(at, selection.block_size, selection.near))[:, None]
    chosen = tiles.of_queries(slice(0, 1))
    index = tiles.keys_of(chosen)[:, :, 0]
    visible = (chosen[:, :, 0] != NONE).repeat_interleave(selection.block_size, -1)
    keys, values = (x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[-1])).to(dtype) for x in cache)
    queries = near_queries = q.to(dtype)
    if inputs.rotary is not None:
        near_queries = inputs.rotary(queries, at)
        near_keys = inputs.rotary(near_keys, at - back)
    if inputs.rotary is not None and inputs.rotates_chosen:
        queries = near_queries
        places = (at[:, None] - tiles.cached + index).flatten(0, 1)
        keys = inputs.rotary(keys.flatten(0, 1)[:, None], places)[:, 0].unflatten(0, (batch, kv_heads))
    elif inputs.rotary is not None:  # one softmax has one temperature
        queries, keys = inputs.rotary.at_start(queries), inputs.rotary.at_start(keys)
    scores = torch.cat([_scores(near_queries, near_keys), _scores(queries, keys)], -1)
    seen = torch.cat([near_visible.expand(-1, kv_heads, -1), visible], -1).repeat_interleave(group, 1)
    weights = scores.masked_fill(~seen[:, :, None], -torch.inf).softmax(-1)
    # Padding sees nothing: 0 / 0 in the formula and 0 here.
    weights = weights.masked_fill(~seen[:, :, None], 0.0)
    rows = weights.unflatten(1, (kv_heads, group)).flatten(2, 3)
    return (rows @ torch.cat([near_values, values], 2)).flatten(1, 2)[:, :, None]


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    """q.k / sqrt(d) (B, H, 1, n) of queries (B, H, 1, d) and keys (B, H_kv, n, d)."""
    rows = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3) * queries.shape[-1] ** -0.5
    return (rows @ keys.transpose(-1, -2)).flatten(1, 2)[:, :, None]

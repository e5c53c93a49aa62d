"""Any device: linear time by blocks, or, where a query reads little less than all keys, all of them with a mask."""

import torch
from torch import Tensor

from megakernel.ops.documents import token_positions
from megakernel.ops.selected_attention import one_token
from megakernel.ops.selected_attention.by_block import attention_by_block
from megakernel.ops.selected_attention.inputs import SelectedInputs
from megakernel.ops.selected_attention.masked import masked_attention
from megakernel.ops.selected_attention.tiles import choose_for_tiles
from megakernel.ops.tensors import accum_dtype
from megakernel.ops.window import rotate_keys

MASKED = 3
"""Sequences of at most this many times the keys that a query reads get a mask: a key by block costs more."""


def attend(q: Tensor, k: Tensor, v: Tensor, inputs: SelectedInputs) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, D) in float32 or better, and the blocks that the last tile chose, as `SelectedInputs.choice`."""
    tiles = choose_for_tiles(q, inputs)
    if q.shape[2] == 1:
        return one_token.attend(q, k, v, inputs, tiles), tiles.last_choice(inputs.choice)
    vectors = vectors_of(q, k, v, inputs, accum_dtype(q.dtype))
    if inputs.ring is None and tiles.total <= MASKED * tiles.keys_of_query:
        out = masked_attention(*vectors, tiles)
    else:
        out = attention_by_block(*vectors, tiles, inputs.ring)
    return out, tiles.last_choice(inputs.choice)


def vectors_of(
    q: Tensor, k: Tensor, v: Tensor, inputs: SelectedInputs, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries (B, H, N, d) and keys (B, H_kv, T, d), first those for windows, then those for chosen blocks; values.

    The order: near queries, queries, near keys, keys, values (B, H_kv, T, D).
    """
    cache, rotary = inputs.cache, inputs.rotary
    queries, keys = q.to(dtype), torch.cat([cache.keys, k], 2).to(dtype)
    near_queries, near_keys = queries, keys
    if rotary is not None:
        at = token_positions(inputs.positions, q.shape[2], q.device)
        near_queries = rotary(queries, at)
        near_keys = torch.cat(rotate_keys(rotary, cache.keys.to(dtype), k.to(dtype), at), 2)
    if inputs.rotates_chosen:
        queries, keys = near_queries, near_keys
    elif rotary is not None:  # one softmax has one temperature
        queries, keys = rotary.at_start(queries), rotary.at_start(keys)
    return near_queries, queries, near_keys, keys, torch.cat([cache.values, v], 2).to(dtype)

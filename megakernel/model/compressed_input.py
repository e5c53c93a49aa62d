"""FLuRKA eq. 2 over a mesh: E and F compress the layer's input, and keys and values are projected from landmarks.

Every rank computes E X on its own tokens. The ranks then sum d_k * d_model numbers for each of E and F, whatever the
number of tokens.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from megakernel.attention import AttentionInputs
from megakernel.attention.low_rank import LowRankAttention
from megakernel.parallel import all_reduce, replicated

if TYPE_CHECKING:
    from megakernel.parallel import Mesh, OneProcess


class SplitTokens(NamedTuple):
    """A layer's input, for queries and for landmarks."""

    all: Tensor
    """(N, B, C), all tokens of this context-parallel shard, for the queries."""

    local: Tensor
    """(n, B, C), the tokens that this tensor rank compresses."""

    first: int
    """Index of the first of these in the shard."""


def split_tokens(hidden: Tensor, mesh: "Mesh | OneProcess") -> SplitTokens:
    """Split tokens over the tensor ranks: as sequence parallelism has split them, else equally.

    Backward sums the gradients over the tensor ranks.
    """
    tp = mesh.tp
    if mesh.sequence_parallel:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        whole = gather_from_sequence_parallel_region(hidden, group=tp.group)
        return SplitTokens(whole, hidden, tp.rank * len(hidden))
    whole = replicated(hidden, tp.group)
    start, end = (rank * len(hidden) // tp.size for rank in (tp.rank, tp.rank + 1))
    return SplitTokens(whole, whole[start:end], start)


def project(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parts: tuple[int, ...],
    core: LowRankAttention,
    mesh: "Mesh | OneProcess",
    inputs: AttentionInputs,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of tokens, keys and values of landmarks, each (tokens or landmarks, B, H_kv, its rows per key head).

    Args:
        hidden: (N, B, C), or this rank's (N / tp, B, C) under sequence parallelism.
        weight: the fused projection, rows grouped by key head as [queries | key | value].
        bias: of its rows; added to the landmarks, because E (X W + b) is not (E X) W + b.
        parts: query, key and value rows per key head.
        core: the mechanism, whose `compress` applies E and F.
        mesh: ranks to sum over.
        inputs: this rank's shard of the sequence and its padding; padding is moved behind the real tokens.
    """
    tokens = split_tokens(hidden, mesh)
    local, cp_shard, padding_mask = tokens.local, inputs.cp_shard, inputs.padding_mask
    if padding_mask is not None:
        assert cp_shard.size == 1, "padded documents are whole on every rank"
        local = padding_last(tokens.all, padding_mask)[tokens.first : tokens.first + len(local)]
    length = len(tokens.all)
    landmarks = core.compress(
        local, first=cp_shard.rank * length + tokens.first, length=cp_shard.size * length
    )
    # Rounded once, after the sum over all ranks.
    landmarks = cp_shard.all_reduce(all_reduce(landmarks, mesh.tp.group)).to(local.dtype)

    sources = (tokens.all, landmarks[0], landmarks[-1])
    rows = weight.unflatten(0, (-1, sum(parts))).split(parts, 1)
    biases: Sequence[Tensor | None] = (None, None, None)
    if bias is not None:
        biases = bias.unflatten(0, (-1, sum(parts))).split(parts, 1)
    queries, keys, values = (_vectors(*each) for each in zip(sources, rows, biases, strict=True))
    return queries, keys, values


def _vectors(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(N, B, C) through (H_kv, rows, C), plus (H_kv, rows) -> (N, B, H_kv, rows)."""
    shift = None if bias is None else bias.flatten().to(x.dtype)
    return F.linear(x, weight.flatten(0, 1).to(x.dtype), shift).unflatten(-1, weight.shape[:2])


def padding_last(x: Tensor, mask: Tensor) -> Tensor:
    """Tokens (N, B, C) with the real ones moved to the front of their sequence, in order, and zeros behind."""
    order = mask.int().argsort(dim=1, descending=True, stable=True)
    front = x.gather(0, order.T[..., None].expand_as(x))
    return front * mask.gather(1, order).T[..., None].to(x.dtype)

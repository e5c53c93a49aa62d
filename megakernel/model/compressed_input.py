"""FLuRKA eq. 2 over a mesh: E and F act on the layer's input, and keys and values are projections of landmarks alone.

Every process forms E X on the tokens it holds. What travels is the sum, d_k * d_model words for each of E and F,
whatever the number of tokens.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from megakernel.attention import AttentionInputs
from megakernel.attention.low_rank import LowRankAttention
from megakernel.parallel import replicated, total

if TYPE_CHECKING:
    from megakernel.parallel import Mesh, OneProcess


class Tokens(NamedTuple):
    """A layer's input as its two uses take it."""

    whole: Tensor
    """(N, B, C), all tokens of this shard of the sequence, for the queries."""

    mine: Tensor
    """(n, B, C), those whose landmarks this tensor rank forms."""

    first: int
    """Place of the first of them within the shard."""


def share_tokens(hidden: Tensor, mesh: "Mesh | OneProcess") -> Tokens:
    """Each tensor rank's tokens: its own under sequence parallelism, an equal share of the copies otherwise.

    Gradients of all uses are summed over the tensor ranks on the way back.
    """
    tp = mesh.tp
    if mesh.sequence_parallel:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        whole = gather_from_sequence_parallel_region(hidden, group=tp.group)
        return Tokens(whole, hidden, tp.rank * len(hidden))
    whole = replicated(hidden, tp.group)
    start, end = (rank * len(hidden) // tp.size for rank in (tp.rank, tp.rank + 1))
    return Tokens(whole, whole[start:end], start)


def project(
    hidden: Tensor,
    weight: Tensor,
    parts: tuple[int, int, int],
    core: LowRankAttention,
    mesh: "Mesh | OneProcess",
    inputs: AttentionInputs,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of all tokens, keys and values of landmarks.

    Args:
        hidden: (N, B, C), or this rank's (N / tp, B, C) under sequence parallelism.
        weight: the fused projection, rows grouped by key head as [queries | key | value].
        parts: how many of each a key head has.
        core: the mechanism; its `compress` knows E and F.
        mesh: where sums go.
        inputs: this process's shard of the sequence, and its padding, behind which no real token stays.

    Returns:
        q (B, H, N, d), k and v (B, H_kv, L, d), or k (B, H_kv, M, L, d) of M keys per key head.

    Raises:
        ValueError: padding with sequence parallelism or a sequence in shards.
    """
    tokens = share_tokens(hidden, mesh)
    mine, cp_shard, padding_mask = tokens.mine, inputs.cp_shard, inputs.padding_mask
    if padding_mask is not None:
        if mesh.sequence_parallel or cp_shard.size > 1:
            raise ValueError(
                "padding with a compressed input needs whole sequences; set parallel.sequence_parallel: false "
                "and parallel.context: 1, or compression.compress: projected"
            )
        mine = real_first(tokens.whole, padding_mask)[tokens.first : tokens.first + len(mine)]
    length = len(tokens.whole)
    landmarks = core.compress(
        mine, first=cp_shard.rank * length + tokens.first, length=cp_shard.size * length
    )
    # Whole sums are rounded once, to what the projections multiply.
    landmarks = cp_shard.total(total(landmarks, mesh.tp.group)).to(mine.dtype)

    queries, keys, values = weight.unflatten(0, (-1, sum(parts), core.head_dim)).split(parts, 1)
    q = _heads(tokens.whole, queries)
    k = _heads(landmarks[0], keys)
    return q, k if parts[1] == 1 else k.unflatten(1, (-1, parts[1])), _heads(landmarks[-1], values)


def _heads(x: Tensor, weight: Tensor) -> Tensor:
    """(N, B, C) through (H_kv, heads, d, C) -> (B, H_kv heads, N, d)."""
    out = F.linear(x, weight.flatten(0, 2).to(x.dtype))
    return out.unflatten(-1, (-1, weight.shape[2])).permute(1, 2, 0, 3)


def real_first(x: Tensor, mask: Tensor) -> Tensor:
    """Tokens (N, B, C) with the real ones at the front of their sequence, in order, and zeros behind."""
    order = mask.int().argsort(dim=1, descending=True, stable=True)
    front = x.gather(0, order.T[..., None].expand_as(x))
    return front * mask.gather(1, order).T[..., None].to(x.dtype)

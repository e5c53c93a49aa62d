"""Reformer's attention: tokens attend within chunks of those that hash alike (docs/formulas.md, 12)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.arguments import check_heads
from megakernel.ops.dispatch import choose
from megakernel.ops.tensors import accum_dtype


def reformer_attention(
    q: Tensor,
    v: Tensor,
    *,
    rotations: Tensor,
    chunk_size: int,
    counts: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax of q_i.q_j / |q_j| over the tokens of i's chunk and of the one before it, in rounds, without i itself.

    N log N in the number of tokens; not causal. A token that a query sees in several rounds counts as often.

    Args:
        q: (B, H, N, d), queries that are also the keys.
        v: (B, H_kv, N, D), H a multiple of H_kv.
        rotations: (H, R, d, n / 2), a random matrix for each round; n is the number of buckets.
        chunk_size: tokens per chunk, at least 2.
        counts: (B,) real tokens of each sequence, which come first; None: all are real.
        backend: reference or chunked.

    Returns:
        (B, H, N, D) in the dtype of v. A sequence of one token gives its value.

    Raises:
        ValueError: invalid shapes or dtypes; the message names the argument.
    """
    check_heads(q, q[:, : v.shape[1]], v)
    if counts is None:
        counts = torch.full((q.shape[0],), q.shape[2], device=q.device)
    dtype = accum_dtype(q.dtype)
    values = v.to(dtype).repeat_interleave(q.shape[1] // v.shape[1], 1)
    attend = choose(IMPLEMENTATIONS, backend)
    return attend(q.to(dtype), values, rotations.to(dtype), chunk_size, counts).to(v.dtype)


@torch.no_grad()
def hashed(x: Tensor, rotations: Tensor) -> Tensor:
    """Buckets (B, H, R, N) of tokens x (B, H, N, d): the index of the largest number of [x W, -x W]."""
    rotated = torch.einsum("bhnd,hrdm->bhrnm", x, rotations)
    return torch.cat([rotated, -rotated], -1).argmax(-1)


def chunked(x: Tensor, v: Tensor, rotations: Tensor, chunk_size: int, counts: Tensor) -> Tensor:
    """Tokens sorted by (bucket, position), in chunks; x and v have H heads."""
    buckets, length = hashed(x, rotations), x.shape[2]
    real = torch.arange(length, device=x.device) < counts[:, None]
    buckets = buckets.masked_fill(~real[:, None, None], 2 * rotations.shape[-1])
    order = buckets.argsort(dim=-1, stable=True)

    def in_order(y: Tensor) -> Tensor:
        """(B, H, N, D) -> chunks (B, H, R, C, chunk_size, D)."""
        rounds = y[:, :, None].expand(-1, -1, order.shape[2], -1, -1)
        y = rounds.gather(3, order[..., None].expand(-1, -1, -1, -1, y.shape[-1]))
        return F.pad(y, (0, 0, 0, -length % chunk_size)).unflatten(3, (-1, chunk_size))

    queries = in_order(x)
    keys, values = (_with_previous(in_order(y)) for y in (F.normalize(x, dim=-1), v))
    visible = _visible(queries.shape[3], chunk_size, counts)[:, None, None]
    scores = (queries @ keys.transpose(-1, -2)).masked_fill(~visible, torch.finfo(x.dtype).min)
    lse = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse).exp() @ values

    def restored(y: Tensor) -> Tensor:
        """Chunks -> (B, H, R, N, D), tokens in their own order."""
        y = y.flatten(3, 4)[:, :, :, :length]
        return y.gather(3, order.argsort(-1)[..., None].expand(-1, -1, -1, -1, y.shape[-1]))

    return (restored(lse).softmax(2) * restored(out)).sum(2)


def _with_previous(y: Tensor) -> Tensor:
    """Chunks (B, H, R, C, m, D) -> (B, H, R, C, 2 m, D): the chunk before each, zeros before the first, and itself."""
    return torch.cat([F.pad(y, (0, 0, 0, 0, 1, 0))[:, :, :, :-1], y], -2)


def _visible(chunks: int, size: int, counts: Tensor) -> Tensor:
    """(B, C, m, 2 m): whether a sorted token sees a token of its chunk and the one before it."""
    places = torch.arange(chunks * size, device=counts.device).view(chunks, size)
    keys = torch.cat([places - size, places], -1)[:, None]
    other = (keys >= 0) & (keys != places[..., None])
    ends = counts[:, None, None, None]
    # Only a token without any other sees itself.
    return (keys < ends) & (other | ((ends == 1) & (keys == 0)))


def reference(x: Tensor, v: Tensor, rotations: Tensor, chunk_size: int, counts: Tensor) -> Tensor:
    """From the definition, with N x N matrices of how often a query sees a key."""
    out = torch.zeros_like(v)
    for sequence, count in enumerate(counts.tolist()):
        for head in range(x.shape[1] if count else 0):
            tokens = x[sequence, head, :count]
            seen = torch.zeros(count, count, dtype=x.dtype)
            for rotation in rotations[head]:
                rotated = (tokens @ rotation).tolist()
                numbers = [row + [-number for number in row] for row in rotated]
                ordered = sorted(range(count), key=lambda at: (numbers[at].index(max(numbers[at])), at))
                chunk = {token: place // chunk_size for place, token in enumerate(ordered)}
                for i in range(count):
                    for j in range(count):
                        seen[i, j] += i != j and chunk[i] - chunk[j] in (0, 1)
            if count == 1:
                seen += 1
            lengths = tokens.square().sum(-1).sqrt()
            weights = seen.to(x.device) * (tokens @ tokens.T / lengths).exp()
            out[sequence, head, :count] = weights / weights.sum(-1, keepdim=True) @ v[sequence, head, :count]
    return out


IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}
"""Backend -> implementation."""

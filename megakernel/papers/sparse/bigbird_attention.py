"""BigBird's attention: windows of blocks, global blocks and random blocks (docs/formulas.md, 12)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.arguments import check_heads
from megakernel.ops.dispatch import choose
from megakernel.ops.tensors import accum_dtype
from megakernel.papers.sparse import BITS

MISSING = -1
"""In place of a random block where a sequence has too few."""


def bigbird_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    random_blocks: Tensor,
    block_size: int,
    reach: int = 1,
    counts: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax of q.k / sqrt(d) over the blocks that a query's block reads; its first and last block read all tokens.

    Linear in the number of tokens; not causal.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv.
        v: (B, H_kv, N, D).
        random_blocks: int64 (B or 1, H, n, r), as `choose_blocks` returns them for n = ceil(N / block_size) blocks.
        block_size: tokens per block, b.
        reach: blocks of the window on each side of a query's block.
        counts: (B,) real tokens of each sequence, which come first; None: all are real.
        backend: reference or chunked.

    Returns:
        (B, H, N, D) in the dtype of v.

    Raises:
        ValueError: invalid shapes or dtypes; the message names the argument.
    """
    check_heads(q, k, v)
    if counts is None:
        counts = torch.full((q.shape[0],), q.shape[2], device=q.device)
    attend = choose(IMPLEMENTATIONS, backend)
    return attend(q, k, v, random_blocks.expand(len(q), -1, -1, -1), block_size, reach, counts)


def fixed_blocks(blocks: Tensor, places: Tensor, reach: int) -> Tensor:
    """The blocks (B, n, 3 + 2 reach) that are not random for each block of `places` (n,); MISSING for what is absent.

    blocks: (B,) number of blocks of each sequence. They are the first, the last and those of the window, each once.
    """
    window = places[:, None] + torch.arange(-reach, reach + 1, device=places.device)
    last = blocks[:, None, None] - 1
    inside = torch.where((window > 0) & (window < last), window, MISSING)
    ends = torch.cat([torch.zeros_like(last), torch.where(last > 0, last, MISSING)], -1)
    return torch.cat([ends.expand(-1, len(places), -1), inside], -1)


def choose_blocks(draws: Tensor, blocks: Tensor, reach: int) -> Tensor:
    """Distinct random blocks (B, H, n, r) besides the fixed ones, from uniform integers `draws` (H, n, r).

    blocks: (B,) number of blocks of each sequence. All are chosen if there are fewer than r, and the rest is MISSING.
    """
    places = torch.arange(draws.shape[1], device=draws.device)
    fixed = fixed_blocks(blocks, places, reach)
    # A missing one sorts behind all blocks, where no pick counts it.
    behind = draws.shape[1]
    taken = torch.where(fixed == MISSING, behind, fixed).sort(-1).values[:, None]
    free = blocks[:, None] - (fixed != MISSING).sum(-1)
    picks: list[Tensor] = []
    for index, draw in enumerate(draws.unbind(-1)):
        left = (free - index)[:, None]
        pick = draw * left.clamp(min=0) >> BITS
        # The pick counts the blocks that are left: each taken one at or before it moves it on by one.
        for before in taken.unbind(-1):
            pick = pick + (before <= pick)
        picks.append(torch.where(left > 0, pick, MISSING))
        taken = taken.expand(-1, len(draws), -1, -1)
        taken = torch.cat([taken, torch.where(left > 0, pick, behind)[..., None]], -1).sort(-1).values
    return torch.stack(picks, -1)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    random_blocks: Tensor,
    block_size: int,
    reach: int,
    counts: Tensor,
) -> Tensor:
    """Linear time: the read blocks of each block of queries are gathered beside each other."""
    out_dtype, dtype, length = v.dtype, accum_dtype(q.dtype), q.shape[2]
    q = _blocks(q.to(dtype) * q.shape[-1] ** -0.5, block_size)
    k, v = (_blocks(x.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], 1), block_size) for x in (k, v))
    places = torch.arange(q.shape[2], device=q.device)
    number = (counts + block_size - 1) // block_size
    fixed = fixed_blocks(number.clamp(min=1), places, reach)[:, None].expand(-1, q.shape[1], -1, -1)
    read = torch.cat([fixed, random_blocks], -1)
    in_block = torch.arange(block_size, device=q.device)
    real = read[..., None] * block_size + in_block < counts[:, None, None, None, None]
    visible = (real & (read != MISSING)[..., None]).flatten(-2)
    near_k, near_v = (_gathered(x, read.clamp(min=0)) for x in (k, v))
    near = _attend(q, near_k, near_v, visible[..., None, :])

    # The queries of the first and of the last block, which read everything.
    last = (number - 1).clamp(min=0)[:, None, None]
    ends = torch.cat([torch.zeros_like(last), last], -1).expand(-1, q.shape[1], -1)
    everything = torch.arange(k.shape[2] * block_size, device=q.device) < counts[:, None, None, None]
    queries = _gathered(q, ends[..., None]).flatten(2, 3)
    far = _attend(queries, k.flatten(2, 3), v.flatten(2, 3), everything).unflatten(2, (2, -1))
    is_end = [(places == end).view(-1, 1, len(places), 1, 1) for end in (0 * last, last)]
    out = torch.where(is_end[0], far[:, :, :1], torch.where(is_end[1], far[:, :, 1:], near))
    return out.flatten(2, 3)[:, :, :length].to(out_dtype)


def _blocks(x: Tensor, size: int) -> Tensor:
    """(B, H, N, d) -> (B, H, ceil(N / size), size, d), padded with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def _gathered(x: Tensor, blocks: Tensor) -> Tensor:
    """The tokens (B, H, m, s b, d) of the blocks (B, H, m, s) of x (B, H, n, b, d)."""
    index = blocks.flatten(2)[..., None, None].expand(-1, -1, -1, *x.shape[3:])
    return x.gather(2, index).unflatten(2, blocks.shape[2:]).flatten(3, 4)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention; q is scaled, and a query that sees nothing gets some mean."""
    scores = (q @ k.transpose(-1, -2)).masked_fill(~visible, torch.finfo(q.dtype).min)
    return scores.softmax(-1) @ v


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    random_blocks: Tensor,
    block_size: int,
    reach: int,
    counts: Tensor,
) -> Tensor:
    """From the definition, with an N x N mask of every sequence and head."""
    group, out_dtype = q.shape[1] // k.shape[1], v.dtype
    q, k, v = (x.to(accum_dtype(x.dtype)) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    visible = torch.zeros(*q.shape[:3], q.shape[2], dtype=torch.bool)
    for sequence, count in enumerate(counts.tolist()):
        last = (count - 1) // block_size
        for head in range(q.shape[1]):
            for query in range(count):
                own = query // block_size
                chosen = random_blocks[sequence, head, own].tolist()
                for key in range(count):
                    block = key // block_size
                    is_global = own in (0, last) or block in (0, last)
                    visible[sequence, head, query, key] = (
                        is_global or abs(block - own) <= reach or block in chosen
                    )
    visible = visible.to(q.device)
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    return (torch.nan_to_num(scores.softmax(-1)) @ v).to(out_dtype)


IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}
"""Backend -> implementation."""

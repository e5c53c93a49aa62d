"""Triton kernels of the choice: a program keeps the best blocks so far of its queries, in registers.

`choose_among_all` computes scores tile by tile, so that the matrix of all scores never exists; `largest` reads scores.
Both choose what their namesakes in `choice` do, which they take over where a program would not hold the candidates.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernel.ops.kernels.arguments import head_ptr
from megakernel.ops.kernels.launch import Rows, launch
from megakernel.ops.kernels.primitives import cdiv, dot, padded, power_of_two
from megakernel.ops.landmark_attention import Landmarks, LandmarkVisibility
from megakernel.ops.selected_attention import choice
from megakernel.ops.selected_attention.inputs import NONE, Score, SelectionRule

MOST_CHOSEN = 64
"""The largest k: a program holds twice as many candidates for each of its queries."""

MOST_HEADS = 64
"""The most query heads of a key head: a program has them all."""

ROWS = 64
"""Queries of a program, times the heads of a group."""

LANDMARKS = 32
"""Landmarks that a program multiplies with at once, and more with many candidates; the largest r."""

SCORED_ROWS = 16
"""Queries of a program that reads scores."""

LAUNCH = {"warps": 4}

NO_BLOCK = tl.constexpr(-(2**63))
"""A candidate that stands behind every block."""

LAST_INDEX = tl.constexpr(2**31 - 1)


class Choosers(NamedTuple):
    """Queries, what they score, and what they see of it."""

    q: Rows
    landmarks: Any
    """(terms, B, H_kv, S, r, d), contiguous: see `terms_of`."""

    ends: Any
    """(B, S) int64, see `Landmarks`."""

    first: Any
    """(B, n) int64, see `LandmarkVisibility`; `limit` too."""

    limit: Any
    length: int
    """n."""

    kv_heads: int
    blocks: int
    """S."""

    term_size: int
    """Numbers of a term."""


class ChoiceSizes(NamedTuple):
    """Compile-time constants."""

    queries: int
    """Queries of a program; a power of two."""

    group: int
    """Query heads per key head."""

    rank: int
    """r."""

    terms: int
    """Terms of a landmark."""

    chosen: int
    """Blocks that a query chooses, at most S."""

    block_s: int
    """Blocks that are scored at once, a power of two, from which a step takes as many candidates."""

    width: int
    """d."""

    scale: float
    """1 / sqrt(d)."""

    score: Score

    @property
    def heads(self) -> int:
        """`group` padded to a power of two."""
        return power_of_two(self.group)

    @property
    def parts(self) -> int:
        """`rank` padded to a power of two."""
        return power_of_two(self.rank)

    @property
    def candidates(self) -> int:
        """`chosen` padded to a power of two."""
        return power_of_two(self.chosen)

    @property
    def padded_width(self) -> int:
        """d padded to the power of two of a tile."""
        return padded(self.width)


@triton.jit
def load_queries(args, batch, kv, start, META: tl.constexpr):
    """A tile (R heads, d) of queries, the heads of a query one after the other; zeros where there is none."""
    row, column = tl.arange(0, META.queries * META.heads), tl.arange(0, META.padded_width)
    token, head = start + row // META.heads, row % META.heads
    exists = (token < args.length) & (head < META.group)
    offset = head.to(tl.int64) * args.q.head + token.to(tl.int64) * args.q.row
    pointer = head_ptr(args.q, batch, kv * META.group)
    mask = exists[:, None] & (column < META.width)[None, :]
    return tl.load(pointer + (offset[:, None] + column[None, :]), mask=mask, other=0.0)


@triton.jit
def landmark_ptrs(args, batch, kv, block, META: tl.constexpr):
    """Pointers (blocks r', d) to the first terms of landmarks of consecutive blocks, r' a block; and which exist."""
    row, column = tl.arange(0, META.block_s * META.parts), tl.arange(0, META.padded_width)
    place, part = block + row // META.parts, row % META.parts
    inside = (place < args.blocks) & (part < META.rank)
    number = (batch * args.kv_heads + kv).to(tl.int64) * args.blocks + place
    offset = (number * META.rank + part) * META.width
    return args.landmarks + (offset[:, None] + column[None, :]), inside[:, None] & (column < META.width)[
        None, :
    ]


@triton.jit
def scores_of(args, batch, kv, block, b_q, META: tl.constexpr):
    """Scores (R, blocks) of consecutive blocks as `choice.block_scores` has them."""
    ptrs, mask = landmark_ptrs(args, batch, kv, block, META)
    TERMS: tl.constexpr = META.terms
    b_s = tl.zeros([META.queries * META.heads, META.block_s * META.parts], tl.float32)
    for term in tl.static_range(TERMS):
        b_l = tl.load(ptrs + term * args.term_size, mask=mask, other=0.0)
        b_s += dot(b_q, tl.trans(b_l), b_l.dtype)
    b_s = tl.reshape(b_s * META.scale, [META.queries * META.heads, META.block_s, META.parts])
    b_s = tl.where((tl.arange(0, META.parts) < META.rank)[None, None, :], b_s, float("-inf"))
    best = tl.max(b_s, 2)
    if META.score == "lse":
        best += tl.log(tl.sum(tl.exp(b_s - best[:, :, None]), 2))
    of_heads = tl.reshape(best, [META.queries, META.heads, META.block_s])
    of_heads = tl.where((tl.arange(0, META.heads) < META.group)[None, :, None], of_heads, float("-inf"))
    return tl.max(of_heads, 1)


@triton.jit
def candidates_of(scores, block, visible):
    """Numbers int64 in the order of the choice: the larger score first, and of equal ones the earlier block."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # 0 and -0 are equal
    ordered = (bits ^ ((bits >> 31) & LAST_INDEX)).to(tl.int64)
    return tl.where(visible, (ordered << 32) | (block ^ LAST_INDEX).to(tl.int64)[None, :], NO_BLOCK)


@triton.jit
def choose(args, chosen, META: tl.constexpr):
    """Write chosen (B, H_kv, n, k) int64. Program: R queries of a key head, which go over all blocks."""
    R: tl.constexpr = META.queries
    K: tl.constexpr = META.candidates
    tiles = tl.cdiv(args.length, R)
    sequence = tl.program_id(0) // tiles
    batch, kv = sequence // args.kv_heads, sequence % args.kv_heads
    start = tl.program_id(0) % tiles * R
    token = start + tl.arange(0, R)
    seen = tl.cast(batch, tl.int64) * args.length + token
    first = tl.load(args.first + seen, mask=token < args.length, other=0)
    limit = tl.load(args.limit + seen, mask=token < args.length, other=NO_BLOCK)
    b_q = load_queries(args, batch, kv, start, META)
    best = tl.full([R, K], NO_BLOCK, tl.int64)
    for begin in range(0, args.blocks, META.block_s):
        block = begin + tl.arange(0, META.block_s)
        end = tl.load(
            args.ends + tl.cast(batch, tl.int64) * args.blocks + block,
            mask=block < args.blocks,
            other=NO_BLOCK,
        )
        visible = (end[None, :] >= first[:, None]) & (end[None, :] < limit[:, None])
        # Blocks of later tokens and of other documents cost no product.
        if tl.max(tl.max(visible.to(tl.int32), 1), 0) > 0:
            scores = scores_of(args, batch, kv, begin, b_q, META)
            best = best_of(best, candidates_of(scores, block, visible), R, K)
    row = tl.cast(sequence, tl.int64) * args.length + token
    store_choice(chosen, row, token < args.length, best, META.chosen, K)


@triton.jit
def best_of(best, found, R: tl.constexpr, K: tl.constexpr):
    """The K largest numbers of each row of best (R, K) and found (R, K or more), the largest first."""
    # What is no better costs no sorting.
    if tl.max((tl.max(found, 1) > tl.min(best, 1)).to(tl.int32), 0) > 0:
        best = tl.topk(tl.reshape(tl.join(best, tl.topk(found, K)), [R, 2 * K]), K)
    return best


@triton.jit
def store_choice(chosen, row, exists, best, count: tl.constexpr, K: tl.constexpr):
    """Store the first `count` candidates of each row, in the order of the blocks, in the rows (R,) of chosen."""
    place = tl.arange(0, K)
    inside = (best != NO_BLOCK) & (place < count)[None, :]
    index = tl.sort(tl.where(inside, (best & LAST_INDEX).to(tl.int32) ^ LAST_INDEX, LAST_INDEX))
    index = tl.where(index == LAST_INDEX, -1, index).to(tl.int64)
    tl.store(
        chosen + (row[:, None] * count + place[None, :]),
        index,
        mask=exists[:, None] & (place < count)[None, :],
    )


@triton.jit
def choose_scored(scores, chosen, rows, size, count: tl.constexpr, R: tl.constexpr, K: tl.constexpr):
    """Write chosen (rows, k) int64, the places of the largest of scores (rows, size) float32. Program: R rows."""
    BLOCK: tl.constexpr = max(K, 64)
    row = tl.cast(tl.program_id(0), tl.int64) * R + tl.arange(0, R)
    best = tl.full([R, K], NO_BLOCK, tl.int64)
    for begin in range(0, size, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (place < size)[None, :]
        b_s = tl.load(scores + (row[:, None] * size + place[None, :]), mask=inside, other=float("-inf"))
        best = best_of(best, candidates_of(b_s, place, b_s > float("-inf")), R, K)
    store_choice(chosen, row, row < rows, best, count, K)


def terms_of(landmarks: Tensor, dtype: torch.dtype) -> Tensor:
    """Tensors (terms, ...) whose sum is the float32 landmarks, for products with queries of `dtype`.

    Three of bfloat16 have the 24 bits of float32. float16 does not reach as far down, and there is one in float32.
    """
    rest = landmarks.float()
    if dtype != torch.bfloat16:
        return rest.contiguous()[None]
    terms = []
    for _ in range(3):
        terms.append(rest.to(dtype))
        rest = rest - terms[-1]
    return torch.stack(terms)


@torch.no_grad()
def choose_among_all(
    queries: Tensor, landmarks: Landmarks, visibility: LandmarkVisibility, selection: SelectionRule
) -> Tensor:
    """See `choice.choose_among_all`."""
    batch, kv_heads, group, length, width = queries.shape
    count, rank = landmarks.keys.shape[2:4]
    if not count or selection.chosen > MOST_CHOSEN or group > MOST_HEADS or rank > LANDMARKS:
        return choice.choose_among_all(queries, landmarks, visibility, selection)
    terms = terms_of(landmarks.keys, queries.dtype)
    chosen = min(selection.chosen, count)
    block_s = max(LANDMARKS // power_of_two(rank), power_of_two(chosen))
    meta = ChoiceSizes(
        max(1, ROWS // power_of_two(group)),
        *(group, rank, len(terms), chosen, block_s),
        *(width, width**-0.5, selection.score),
    )
    ends, first, limit = (x.expand(batch, -1).contiguous() for x in (landmarks.ends, *visibility))
    args = Choosers(
        Rows.of(queries.flatten(1, 2)), terms, ends, first, limit, length, kv_heads, count, terms[0].numel()
    )
    # Launches that are only recorded leave it so.
    blocks = queries.new_full((batch, kv_heads, length, chosen), NONE, dtype=torch.int64)
    programs = batch * kv_heads * cdiv(length, meta.queries)
    launch(choose, (programs,), args, blocks, META=meta, **LAUNCH)
    return blocks


@torch.no_grad()
def largest(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """See `choice.largest`."""
    size = scores.shape[-1]
    count = min(count, size)
    if not 0 < count <= MOST_CHOSEN:
        return choice.largest(scores, visible, count)
    scores = scores.masked_fill(~visible, -math.inf).contiguous()
    chosen = scores.new_full((*scores.shape[:-1], count), NONE, dtype=torch.int64)
    rows = scores[..., 0].numel()
    launch(
        choose_scored,
        (cdiv(rows, SCORED_ROWS),),
        *(scores, chosen, rows, size),
        count=count,
        R=SCORED_ROWS,
        K=power_of_two(count),
        **LAUNCH,
    )
    return chosen


CHOICE = choice.Choice(choose_among_all, largest)

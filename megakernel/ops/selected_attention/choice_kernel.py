"""Triton kernels of the choice: a program keeps the best blocks so far of its queries, in registers.

`choose_among_all` computes scores tile by tile, so that the matrix of all scores never exists. Of two levels the second
has other blocks for every query: `list_scorer` multiplies each group of blocks with the queries that list it, and
`largest` reads these scores. All three do what their namesakes in `choice` do, which they call where a program would
not hold what it needs.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernel.ops.kernels.launch import Rows, launch
from megakernel.ops.kernels.primitives import cdiv, dot, padded, power_of_two
from megakernel.ops.landmark_attention import Landmarks, LandmarkVisibility
from megakernel.ops.selected_attention import choice
from megakernel.ops.selected_attention.choice import places_of_all
from megakernel.ops.selected_attention.inputs import NONE, Score, SelectionRule
from megakernel.ops.selected_attention.kernels import gather, tile_of
from megakernel.ops.selected_attention.readers import readers_of

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


class ListedGroups(NamedTuple):
    """Queries, and the groups of blocks that they list."""

    q: Rows
    landmarks: Any
    """(terms, B H_kv S, r, d), contiguous: see `terms_of`."""

    places: Any
    """(B H_kv Z, g) int64: the blocks of a group, see `choice.places_of_all`."""

    items: Any
    """(J,) int64: the group of blocks, see `readers.Readers`; `pairs` too."""

    tokens: Any
    """(J, R) int64: the queries' indices in their sequence; -1 where there is none."""

    pairs: Any
    """(J, R) int64"""

    kv_heads: int
    groups: int
    """Z."""

    blocks: int
    """g."""

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
def load_queries(q, batch, kv, token, exists, META: tl.constexpr):
    """The heads, one after the other, of the queries `token` of a key head (R heads,), each index once per head.

    A tile (R heads, d); zeros where there is none.
    """
    head = tl.arange(0, META.queries * META.heads) % META.heads
    exists = exists & (head < META.group)
    return gather(q, batch, kv * META.group + head, token, exists, META.width, META.padded_width)


@triton.jit
def scores_of(landmarks, term_size, block, exists, b_q, META: tl.constexpr):
    """Scores (R, blocks) of queries as `choice.block_scores` has them.

    block, exists: (blocks r',) of each landmark, r' a block, its block among those of all key heads.
    """
    part = tl.arange(0, META.block_s * META.parts) % META.parts
    exists = exists & (part < META.rank)
    ptrs, mask = tile_of(landmarks, block * META.rank + part, exists, META.width, META.padded_width)
    TERMS: tl.constexpr = META.terms
    b_s = tl.zeros([META.queries * META.heads, META.block_s * META.parts], tl.float32)
    for term in tl.static_range(TERMS):
        b_l = tl.load(ptrs + term * term_size, mask=mask, other=0.0)
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
    token_of_row = start + tl.arange(0, R * META.heads) // META.heads
    b_q = load_queries(args.q, batch, kv, token_of_row, token_of_row < args.length, META)
    place_of_row = tl.arange(0, META.block_s * META.parts) // META.parts
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
            place = begin + place_of_row
            number = tl.cast(sequence, tl.int64) * args.blocks + place
            scores = scores_of(args.landmarks, args.term_size, number, place < args.blocks, b_q, META)
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
def score_listed(args, scores, META: tl.constexpr):
    """Write scores (lists, g) float32 of the blocks of a group. Program: up to R of the queries that list it."""
    R: tl.constexpr = META.queries
    reader = tl.program_id(0)
    tokens = args.tokens + tl.cast(reader, tl.int64) * R
    token = tl.load(tokens + tl.arange(0, R))
    if tl.max(token, 0) < 0:
        return
    item = tl.load(args.items + reader)
    sequence = item // args.groups
    token_of_row = tl.load(tokens + tl.arange(0, R * META.heads) // META.heads)
    batch, kv = sequence // args.kv_heads, sequence % args.kv_heads
    b_q = load_queries(args.q, batch, kv, token_of_row, token_of_row >= 0, META)
    row = tl.load(args.pairs + tl.cast(reader, tl.int64) * R + tl.arange(0, R)) * args.blocks
    place_of_row = tl.arange(0, META.block_s * META.parts) // META.parts
    for begin in range(0, args.blocks, META.block_s):
        inside = begin + place_of_row < args.blocks
        block = tl.load(args.places + item * args.blocks + begin + place_of_row, mask=inside, other=0)
        b_s = scores_of(args.landmarks, args.term_size, block, inside, b_q, META)
        place = begin + tl.arange(0, META.block_s)
        mask = (token >= 0)[:, None] & (place < args.blocks)[None, :]
        tl.store(scores + (row[:, None] + place[None, :]), b_s, mask=mask)


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


def holds(group: int, rank: int) -> bool:
    """Whether a program has registers for G query heads of a key head, and r landmarks of a block."""
    return group <= MOST_HEADS and rank <= LANDMARKS


def sizes_of(queries: Tensor, rank: int, terms: int, chosen: int, block_s: int, score: Score) -> ChoiceSizes:
    """The constants of kernels whose queries are (B, H_kv, G, n, d)."""
    group, width = queries.shape[2], queries.shape[4]
    number = max(1, ROWS // power_of_two(group))
    return ChoiceSizes(number, group, rank, terms, chosen, block_s, width, width**-0.5, score)


@torch.no_grad()
def choose_among_all(
    queries: Tensor, landmarks: Landmarks, visibility: LandmarkVisibility, selection: SelectionRule
) -> Tensor:
    """See `choice.choose_among_all`."""
    batch, kv_heads, group, length, _ = queries.shape
    count, rank = landmarks.keys.shape[2:4]
    if not count or selection.chosen > MOST_CHOSEN or not holds(group, rank):
        return choice.choose_among_all(queries, landmarks, visibility, selection)
    terms = terms_of(landmarks.keys, queries.dtype)
    chosen = min(selection.chosen, count)
    block_s = max(LANDMARKS // power_of_two(rank), power_of_two(chosen))
    meta = sizes_of(queries, rank, len(terms), chosen, block_s, selection.score)
    ends, first, limit = (x.expand(batch, -1).contiguous() for x in (landmarks.ends, *visibility))
    args = Choosers(
        Rows.of(queries.flatten(1, 2)), terms, ends, first, limit, length, kv_heads, count, terms[0].numel()
    )
    # Launches that are only recorded leave it so.
    blocks = queries.new_full((batch, kv_heads, length, chosen), NONE, dtype=torch.int64)
    programs = batch * kv_heads * cdiv(length, meta.queries)
    launch(choose, (programs,), args, blocks, META=meta, **LAUNCH)
    return blocks


def list_scorer(queries: Tensor, landmarks: Landmarks, selection: SelectionRule) -> choice.ListScorer:
    """See `choice.list_scorer`."""
    if not holds(queries.shape[2], landmarks.keys.shape[3]):
        return choice.list_scorer(queries, landmarks, selection)
    return partial(_scores_of_lists, landmarks.keys, terms_of(landmarks.keys, queries.dtype), selection)


def _scores_of_lists(
    landmarks: Tensor,
    terms: Tensor,
    selection: SelectionRule,
    queries: Tensor,
    places: Tensor,
    lists: Tensor,
) -> Tensor:
    rank = landmarks.shape[3]
    block_s = LANDMARKS // power_of_two(rank)
    meta = sizes_of(queries, rank, len(terms), 1, block_s, selection.score)
    readers = readers_of(lists.flatten(0, 1), places.shape[1], meta.queries)
    tokens = torch.where(readers.exists, readers.queries % queries.shape[3], -1)
    scores = queries.new_full((*lists.shape, selection.group), -math.inf, dtype=torch.float32)
    args = ListedGroups(
        q=Rows.of(queries.flatten(1, 2)),
        landmarks=terms,
        places=places_of_all(places, landmarks),
        items=readers.items,
        tokens=tokens,
        pairs=readers.pairs,
        kv_heads=landmarks.shape[1],
        groups=places.shape[1],
        blocks=selection.group,
        term_size=terms[0].numel(),
    )
    launch(score_listed, (len(readers.items),), args, scores, META=meta, **LAUNCH)
    return scores


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


ON_GPU = choice.Choice(choose_among_all, list_scorer, largest)

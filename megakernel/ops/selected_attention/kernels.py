"""Triton kernels of chosen blocks: every block meets the queries that chose it, in groups of up to R queries.

With scores s = q.k / sqrt(d) in units of log 2 and lse_i the log-sum-exp of a query over all that it reads, its window
included, and with delta_i = do_i.o_i:

    p_ij = exp2(s_ij - lse_i)    dv_j = sum_i p_ij do_i    ds_ij = p_ij (do_i.v_j - delta_i) / sqrt(d)
    dq_i = sum_j ds_ij k_j       dk_j = sum_i ds_ij q_i

`fwd` and `bwd_dq` add to the rows of the queries of a group. A launch has one place of the queries' lists: no query is
in two of its groups, so nothing is added twice at once, and the sums do not depend on the order of programs. `bwd_dkv`
has all places: a program sums over all queries of its block.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from megakernel.ops.kernels.arguments import head_ptr
from megakernel.ops.kernels.launch import Rows
from megakernel.ops.kernels.primitives import dot, load_rows, padded, store_rows


class Groups(NamedTuple):
    """Groups of queries that read the same block; see `readers.Readers`."""

    items: Any
    """(J,) int32: the block, among those of all sequences and key heads."""

    tokens: Any
    """(J, R) int32: the queries' indices in their sequence; -1 where there is none."""

    ends: Any
    """(B H_kv S,) int32: number of groups of this block and of those before it; (k' B H_kv S,) where the groups are
    those of one place of the lists after the other."""

    places: Any
    """(k' + 1,) int32: number of groups before those of each place of the lists, and of all of them."""

    starts: Any
    """(B, S) int32: index of each block's first key."""


class Reads(NamedTuple):
    """Arguments of all kernels."""

    q: Rows
    k: Rows
    v: Rows
    groups: Groups
    length: int
    """N."""

    kv_length: int
    """T."""

    kv_heads: int
    blocks: int
    """S."""


class Sizes(NamedTuple):
    """Compile-time constants of a launch."""

    readers: int
    """R, queries of a group."""

    group: int
    """Query heads per key head."""

    block_size: int
    """b."""

    width: int
    """d."""

    value_dim: int
    """D."""

    scale: float
    """1 / sqrt(d)."""

    scale_log2: float
    """1 / (sqrt(d) log 2)."""

    @property
    def rows(self) -> int:
        """R times the heads of a group, padded to the power of two of a tile."""
        return padded(self.readers * self.group)

    @property
    def padded_block(self) -> int:
        """b padded to the power of two of a tile."""
        return padded(self.block_size)

    @property
    def padded_width(self) -> int:
        """d padded to the power of two of a tile."""
        return padded(self.width)

    @property
    def padded_value_dim(self) -> int:
        """D padded to the power of two of a tile."""
        return padded(self.value_dim)


class KeyBlock(NamedTuple):
    """A block of a key head: where it is, its keys (b, d) and values (b, D)."""

    batch: Any
    kv: Any
    start: Any
    k: Any
    v: Any


@triton.jit
def load_block(reads, item, META: tl.constexpr):
    """The keys and values of a block; rows behind its end are zeros."""
    b: tl.constexpr = META.block_size
    BP: tl.constexpr = META.padded_block
    sequence = item // reads.blocks
    batch, kv = sequence // reads.kv_heads, sequence % reads.kv_heads
    start = tl.load(reads.groups.starts + batch * reads.blocks + item % reads.blocks)
    k = head_ptr(reads.k, batch, kv) + tl.cast(start, tl.int64) * reads.k.row
    v = head_ptr(reads.v, batch, kv) + tl.cast(start, tl.int64) * reads.v.row
    b_k = load_rows(k, reads.k.row, b, BP, META.width, META.padded_width)
    b_v = load_rows(v, reads.v.row, b, BP, META.value_dim, META.padded_value_dim)
    return KeyBlock(batch, kv, start, b_k, b_v)


@triton.jit
def rows_of_group(reads, group, block, META: tl.constexpr):
    """For each row of a tile, a query of a head: its number among (B, H, N), its token and head, and if it exists."""
    row = tl.arange(0, META.rows)
    inside = row < META.readers * META.group
    token = tl.load(
        reads.groups.tokens + tl.cast(group, tl.int64) * META.readers + row // META.group,
        mask=inside,
        other=-1,
    )
    exists = token >= 0
    head = block.kv * META.group + row % META.group
    entry = (block.batch * reads.kv_heads * META.group + head).to(tl.int64)
    return entry * reads.length + token, token, head, exists


@triton.jit
def gather(rows, batch, head, token, exists, D: tl.constexpr, DP: tl.constexpr):
    """A tile (M, DP) of the tokens (M,) of the heads (M,); zeros where a row does not exist."""
    start = rows.pointer + tl.cast(batch, tl.int64) * rows.batch
    offset = head.to(tl.int64) * rows.head + token.to(tl.int64) * rows.row
    column = tl.arange(0, DP)
    mask = exists[:, None] & (column < D)[None, :]
    return tl.load(start + (offset[:, None] + column[None, :]), mask=mask, other=0.0)


@triton.jit
def tile_of(pointer, place, exists, D: tl.constexpr, DP: tl.constexpr):
    """Pointers (M, DP) to rows of a contiguous (..., D), and a mask of the elements that exist."""
    column = tl.arange(0, DP)
    return pointer + (place[:, None] * D + column[None, :]), exists[:, None] & (column < D)[None, :]


@triton.jit(do_not_specialize=["list_place"])
def fwd(reads, out, lse, list_place, META: tl.constexpr):
    """Add the blocks in one place of the lists to out (B, H, N, D) float32, normalized, and lse (B, H, N), in log 2.

    Program: a group of this place, if there are as many.
    """
    group = tl.load(reads.groups.places + list_place) + tl.program_id(0)
    if group >= tl.load(reads.groups.places + list_place + 1):
        return
    block = load_block(reads, tl.load(reads.groups.items + group), META)
    place, token, head, exists = rows_of_group(reads, group, block, META)
    b_q = gather(reads.q, block.batch, head, token, exists, META.width, META.padded_width)
    ptrs, mask = tile_of(out, place, exists, META.value_dim, META.padded_value_dim)
    b_o = tl.load(ptrs, mask=mask, other=0.0)
    lse_before = tl.load(lse + place, mask=exists, other=0.0)
    b_s = dot(b_q, tl.trans(block.k), b_q.dtype) * META.scale_log2
    b_s = tl.where((tl.arange(0, META.padded_block) < META.block_size)[None, :], b_s, float("-inf"))
    row_max = tl.max(b_s, 1)
    b_p = tl.exp2(b_s - row_max[:, None])
    lse_here = row_max + tl.log2(tl.sum(b_p, 1))
    largest = tl.maximum(lse_before, lse_here)
    lse_after = largest + tl.log2(tl.exp2(lse_before - largest) + tl.exp2(lse_here - largest))
    b_o *= tl.exp2(lse_before - lse_after)[:, None]
    b_o += dot(b_p, block.v, b_q.dtype) * tl.exp2(row_max - lse_after)[:, None]
    tl.store(ptrs, b_o, mask=mask)
    tl.store(lse + place, lse_after, mask=exists)


@triton.jit(do_not_specialize=["list_place"])
def bwd_dq(reads, do, lse, delta, dq, list_place, META: tl.constexpr):
    """Add the blocks in one place of the lists to dq (B, H, N, d) float32. Program: as in `fwd`."""
    group = tl.load(reads.groups.places + list_place) + tl.program_id(0)
    if group >= tl.load(reads.groups.places + list_place + 1):
        return
    block = load_block(reads, tl.load(reads.groups.items + group), META)
    place, token, head, exists = rows_of_group(reads, group, block, META)
    b_q = gather(reads.q, block.batch, head, token, exists, META.width, META.padded_width)
    b_do = gather(do, block.batch, head, token, exists, META.value_dim, META.padded_value_dim)
    b_lse = tl.load(lse + place, mask=exists, other=0.0)
    b_delta = tl.load(delta + place, mask=exists, other=0.0)
    dtype: tl.constexpr = b_q.dtype
    ptrs, mask = tile_of(dq, place, exists, META.width, META.padded_width)
    b_dq = tl.load(ptrs, mask=mask, other=0.0)
    # Keys behind the block's end are zeros, so that their ds adds nothing.
    b_p = tl.exp2(dot(b_q, tl.trans(block.k), dtype) * META.scale_log2 - b_lse[:, None])
    b_ds = b_p * (dot(b_do, tl.trans(block.v), dtype) - b_delta[:, None]) * META.scale
    tl.store(ptrs, b_dq + dot(b_ds, block.k, dtype), mask=mask)


@triton.jit
def bwd_dkv(reads, do, lse, delta, dk, dv, META: tl.constexpr):
    """Write the rows of a block that is read in dk (B, H_kv, T, d) and dv (B, H_kv, T, D). Program: a block."""
    BP: tl.constexpr = META.padded_block
    DP: tl.constexpr = META.padded_width
    VP: tl.constexpr = META.padded_value_dim
    item = tl.program_id(0)
    end = tl.load(reads.groups.ends + item)
    begin = tl.load(reads.groups.ends + item - 1, mask=item > 0, other=0)
    if begin == end:
        return
    block = load_block(reads, item, META)
    b_dk = tl.zeros((BP, DP), tl.float32)
    b_dv = tl.zeros((BP, VP), tl.float32)
    for group in range(begin, end):
        place, token, head, exists = rows_of_group(reads, group, block, META)
        b_q = gather(reads.q, block.batch, head, token, exists, META.width, META.padded_width)
        b_do = gather(do, block.batch, head, token, exists, META.value_dim, META.padded_value_dim)
        b_lse = tl.load(lse + place, mask=exists, other=float("inf"))  # rows that do not exist weigh nothing
        b_delta = tl.load(delta + place, mask=exists, other=0.0)
        dtype: tl.constexpr = b_q.dtype
        b_p = tl.exp2(dot(block.k, tl.trans(b_q), dtype) * META.scale_log2 - b_lse[None, :])
        b_ds = b_p * (dot(block.v, tl.trans(b_do), dtype) - b_delta[None, :]) * META.scale
        b_dv += dot(b_p, b_do, dtype)
        b_dk += dot(b_ds, b_q, dtype)
    b: tl.constexpr = META.block_size
    first = (block.batch * reads.kv_heads + block.kv).to(tl.int64) * reads.kv_length + block.start
    store_rows(dk + first * META.width, META.width, b, b_dk, META.width, META.padded_width)
    store_rows(dv + first * META.value_dim, META.value_dim, b, b_dv, META.value_dim, META.padded_value_dim)

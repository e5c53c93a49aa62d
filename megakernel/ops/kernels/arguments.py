"""Grouped arguments of kernel attention's Triton kernels, and device functions that index them.

Optional arguments are None, which removes the code that reads them from the compiled kernel. A token's place is its
index in the sequence.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernel.ops.kernels.feature_maps import phi
from megakernel.ops.kernels.launch import Rows
from megakernel.ops.kernels.primitives import load_rows, materialize, padded, rounded
from megakernel.ops.kernels.states import document_start


class State(NamedTuple):
    """States (B, H_kv, entries, ...): sums (FP, VP), normalizers (FP) and float32 log scales."""

    sums: Any
    norms: Any
    logs: Any


class Tokens(NamedTuple):
    """Queries or keys, and their features if these are in memory."""

    rows: Any
    """`Rows`; None if only features are read."""

    features: Any
    """(B, H, N, FP) in the dtype of tokens; None for elementwise maps, which every reader recomputes."""

    logs: Any
    """(B, H, N) float32, for unbounded maps."""


class Keys(NamedTuple):
    """Keys, values and key weights."""

    tokens: Tokens
    v: Rows
    """Values. Not named `values`, which Triton's tuples already use for their list of elements."""

    key_weights: Any
    """(B, H_kv, N) float32, or None."""

    priors: Any
    """(H_kv, M) float32, or None."""


class Queries(NamedTuple):
    """Queries in the backward pass, with dO and normalizers."""

    tokens: Tokens
    grad: Rows
    reciprocal: Any
    """1 / den (B, H, N) float32."""

    delta: Any
    """Gradient of den, -dO.O / den (B, H, N) float32; None without normalization."""

    scale: Any
    """r (B, H_kv, N) float32, for unbounded maps."""


class Matrix(NamedTuple):
    """The projection, or None."""

    terms: Any
    """(1 or 2, H_kv, M, d), see `buffer`; in float32 a single term (H_kv, M, d)."""

    low: Any
    """Offset in elements from the first term to the second; None for a single term."""

    @staticmethod
    def of(projection: Tensor | None, heads: int) -> "Matrix":
        """A projection (M, d) or (H_kv, M, d) in float32."""
        if projection is None:
            return Matrix(None, None)
        return Matrix(projection.expand(heads, -1, -1).to(torch.float32).contiguous(), None)

    def buffer(self, projection: Tensor | None, like: Tensor) -> Tensor:
        """A buffer for the terms in the dtype of `like`; empty in float32. projection: what the matrix is `of`.

        Rounding a float32 matrix to bfloat16 would put a relative error of 2^-9 on exponents of size 30; a second term,
        with the rounding errors, reduces it to 2^-17, and both still use tensor cores. A matrix that is in bfloat16, as
        trained weights are, has no such errors.
        """
        if projection is None or like.dtype == torch.float32:
            return like.new_empty(0)
        return like.new_empty(1 if projection.dtype == like.dtype else 2, *self.terms.shape)

    def fill(self, buffer: Tensor) -> None:
        """Write the rounded values into `buffer`, and their rounding errors if it has two terms."""
        if len(buffer):
            rounded_terms = buffer[0].copy_(self.terms)
            if len(buffer) == 2:
                torch.sub(self.terms, rounded_terms, out=buffer[1])

    def split(self, buffer: Tensor) -> "Matrix":
        """This matrix as the terms in a filled `buffer`."""
        return Matrix(buffer, buffer.stride(0) if len(buffer) == 2 else None) if len(buffer) else self


class SequenceInfo(NamedTuple):
    """Document starts, landmark places and lengths of the sequences."""

    starts: Any
    """(B, N) int32, the place where each token's document starts; None if each sequence holds one document."""

    start: int
    """The place where that one document starts."""

    ends: Any
    """(B, N / b) int32: the place of the landmarks of each b tokens, negative for none; None if keys are tokens, or if
    landmarks are always at the last of their b tokens."""

    heads: int
    """Key heads."""

    length: int
    """Tokens; queries and keys are placed among them."""

    queries: int
    keys: int
    decay: Any = None
    """`decay.Decay` for decaying states."""


class Tiling(NamedTuple):
    """Compile-time sizes: how kernels tile sequences."""

    segment: int
    """Tokens between two states in memory."""

    chunk: int
    """Rows of the tile that a program accumulates."""

    block: int
    """Rows per step of its inner loop."""

    group: int
    """Query heads per key head."""

    values: int
    padded_values: int
    keys: int
    """Mixture keys per position; 0: one key without a prior."""

    causal: bool
    block_size: int = 1
    """b, tokens per block of landmarks."""

    rank: int = 0
    """Landmarks per block; 0: keys are tokens, and a token sees itself."""

    @property
    def padded_rank(self) -> int:
        """r padded to the power of two of a tile."""
        return padded(self.rank)

    @property
    def span(self) -> int:
        """Keys per segment."""
        return self.segment // self.block_size * self.rank if self.rank else self.segment


class Tile(NamedTuple):
    """A program's tile of queries."""

    head: Any
    """Query head, counted over the batch."""

    batch: Any
    query_head: Any
    """Query head within the sequence."""

    kv: Any
    """Its key head within the sequence."""

    key_head: Any
    """Its key head, counted over the batch."""

    entry: Any
    """Index of the state that enters the segment."""

    begin: Any
    """First place of the segment; `end`: its last query's place + 1."""

    end: Any
    at: Any
    """First place of the tile; `stop`: its last query's place + 1."""

    stop: Any
    rows: Any
    """Places (C,) of the queries; some may be past `end`."""

    first: Any
    """(C,): where each query's document starts."""


@triton.jit
def tiles_of(length, SPAN: tl.constexpr, C: tl.constexpr):
    """Number of tiles of C in a sequence of segments of SPAN."""
    whole = length // SPAN
    return whole * ((SPAN + C - 1) // C) + tl.cdiv(length - whole * SPAN, C)


@triton.jit
def tile_of_program(length, SPAN: tl.constexpr, C: tl.constexpr):
    """Head, first place of the program's tile of C, begin and end of its segment of SPAN, and the segment's index.

    Tiles never cross the end of a segment, so the last tile of a segment may be short.
    """
    EACH: tl.constexpr = (SPAN + C - 1) // C
    tiles = tiles_of(length, SPAN, C)
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    segment = tile // EACH
    begin = segment * SPAN
    return head, begin + tile % EACH * C, begin, tl.minimum(begin + SPAN, length), segment


@triton.jit
def queries_of_program(seq, TILING: tl.constexpr):
    """The program's `Tile` of TILING.chunk queries."""
    head, at, begin, end, segment = tile_of_program(seq.queries, TILING.segment, TILING.chunk)
    batch, query_head = head // (seq.heads * TILING.group), head % (seq.heads * TILING.group)
    kv = query_head // TILING.group
    key_head = batch * seq.heads + kv
    entry = key_head * tl.cdiv(seq.keys, TILING.span) + segment if TILING.causal else key_head
    rows, stop = at + tl.arange(0, TILING.chunk), tl.minimum(at + TILING.chunk, end)
    first = document_start(seq.starts, batch, rows, seq.length, seq.start)
    return Tile(head, batch, query_head, kv, key_head, entry, begin, end, at, stop, rows, first)


@triton.jit
def token_idx_of_keys(keys, seq, batch, TILING: tl.constexpr):
    """Places (C,) of the keys with these indices."""
    if TILING.rank == 0:
        k_idx = keys
    elif seq.ends is None:
        k_idx = keys // TILING.rank * TILING.block_size + (TILING.block_size - 1)
    else:
        blocks = seq.keys // TILING.rank
        block_idx = tl.minimum(keys // TILING.rank, blocks - 1)
        k_idx = tl.load(seq.ends + batch.to(tl.int64) * blocks + block_idx)
    return k_idx


@triton.jit
def first_key(token, TILING: tl.constexpr):
    """Index of the first key at or after place `token`, which is a multiple of b for landmarks."""
    return token if TILING.rank == 0 else token // TILING.block_size * TILING.rank


@triton.jit
def token_of(key, TILING: tl.constexpr):
    """The earliest place that the key with this index can have."""
    return key if TILING.rank == 0 else key // TILING.rank * TILING.block_size


@triton.jit
def keys_before(token, seq, TILING: tl.constexpr):
    """A bound on the keys that tokens before place `token` see: later keys are invisible to them."""
    if TILING.rank == 0:
        keys = token
    elif seq.ends is None:
        keys = tl.maximum(token - 1, 0) // TILING.block_size * TILING.rank
    else:
        keys = tl.minimum(tl.cdiv(token, TILING.block_size) * TILING.rank, seq.keys)
    return keys


@triton.jit
def head_ptr(rows, batch, head):
    """Pointer to the first row of a head."""
    return rows.pointer + (batch.to(tl.int64) * rows.batch + head.to(tl.int64) * rows.head)


@triton.jit
def projection_ptr(matrix, kv, PHI: tl.constexpr):
    """Pointer to the projection of a key head."""
    return 0 if matrix.terms is None else matrix.terms + kv * PHI.rows * PHI.width


@triton.jit
def load_features(tokens, batch, head, heads, length, end, at, C: tl.constexpr, PHI: tl.constexpr):
    """Features of C tokens of a head of `length`, starting at `at`: halves (C, MP) in the dtype of tokens, logs (C,).

    Features from `end` on are 0, even if that memory was never written.
    """
    MP: tl.constexpr = PHI.padded_rows
    num_valid = end - at
    offset = (batch * heads + head).to(tl.int64) * length + at
    log_scale = tl.zeros((C,), tl.float32)
    if tokens.features is None:
        p_x = head_ptr(tokens.rows, batch, head) + tl.cast(at, tl.int64) * tokens.rows.row
        phi1, _b, _logs = phi(p_x, tokens.rows.row, num_valid, None, None, C, PHI)
        phi1 = materialize(rounded(phi1, p_x.dtype.element_ty))
        phi2 = phi1
    else:
        features = tokens.features + offset * PHI.padded_features
        phi1 = load_rows(features, PHI.padded_features, num_valid, C, MP, MP)
        phi2 = phi1
        if PHI.has_two_halves:
            phi2 = load_rows(features + MP, PHI.padded_features, num_valid, C, MP, MP)
        if PHI.unbounded:
            rows = tl.arange(0, C)
            log_scale = tl.load(tokens.logs + offset + rows, mask=rows < num_valid, other=0.0)
    return phi1, phi2, log_scale


@triton.jit
def load_features_of_queries(tokens, seq, tile, TILING: tl.constexpr, PHI: tl.constexpr):
    """`load_features` of a tile of queries."""
    heads = seq.heads * TILING.group
    return load_features(
        tokens, tile.batch, tile.query_head, heads, seq.queries, tile.end, tile.at, TILING.chunk, PHI
    )


@triton.jit
def tile_ptr(rows, tile):
    """Pointer to the first row of a tile of queries."""
    return head_ptr(rows, tile.batch, tile.query_head) + tl.cast(tile.at, tl.int64) * rows.row


@triton.jit
def load_vector(pointer, at, length, C: tl.constexpr):
    """C elements starting at `at`, zero from `length` on."""
    rows = at + tl.arange(0, C)
    return tl.load(pointer + rows, mask=rows < length, other=0.0)


@triton.jit
def load_half_of_state(state, entry, half: tl.constexpr, PHI: tl.constexpr, VP: tl.constexpr):
    """One half of a state: sums (MP, VP) and normalizer (MP,)."""
    m = half * PHI.padded_rows + tl.arange(0, PHI.padded_rows)
    f = entry.to(tl.int64) * PHI.padded_features + m
    return tl.load(state.sums + f[:, None] * VP + tl.arange(0, VP)[None, :]), tl.load(state.norms + f)


@triton.jit
def store_half_of_state(
    b_state, b_norm, state, entry, half: tl.constexpr, PHI: tl.constexpr, VP: tl.constexpr
):
    """The inverse of `load_half_of_state`."""
    m = half * PHI.padded_rows + tl.arange(0, PHI.padded_rows)
    f = entry.to(tl.int64) * PHI.padded_features + m
    ptrs = state.sums + f[:, None] * VP + tl.arange(0, VP)[None, :]
    tl.store(ptrs, rounded(b_state, state.sums.dtype.element_ty))
    tl.store(state.norms + f, b_norm)

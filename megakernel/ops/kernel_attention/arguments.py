"""Arguments of kernel attention's kernels that belong together, as Triton takes them, and where in them a program is.

What is not there is None, and what reads it is then left out of the compiled kernel.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernel.ops.kernels.features import load_rows, once, padded, phi, rounded
from megakernel.ops.kernels.launch import Rows
from megakernel.ops.kernels.states import first_token


class State(NamedTuple):
    """States (B, H_kv, entries, ...): sums (FP, VP), normalizers (FP) and log scales float32."""

    sums: Any
    norms: Any
    logs: Any


class Tokens(NamedTuple):
    """Queries or keys, and their features where these are in memory."""

    rows: Any
    """`Rows`, None where nobody reads them: their features are enough."""

    features: Any
    """(B, H, N, FP) in the dtype of tokens, or None: a map of single numbers, taken again wherever it is read."""

    logs: Any
    """(B, H, N) float32 of unbounded maps."""


class Keys(NamedTuple):
    """All that is known of keys."""

    tokens: Tokens
    v: Rows
    """Values: `values` of a tuple is a list in Triton."""

    key_weights: Any
    """(B, H_kv, N) float32, or None."""

    priors: Any
    """(H_kv, M) float32, or None."""


class Queries(NamedTuple):
    """All that backward knows of queries."""

    tokens: Tokens
    grad: Rows
    reciprocal: Any
    """1 / den (B, H, N) float32."""

    delta: Any
    """Gradient of den, -dO.O / den (B, H, N) float32, None of outputs that are not normalized."""

    scale: Any
    """r (B, H_kv, N) float32 of unbounded maps."""


class Matrix(NamedTuple):
    """The projection, or None."""

    terms: Any
    """(2, H_kv, M, d), see `fill`; of float32 numbers the one (H_kv, M, d)."""

    low: int
    """From its first term to the second."""

    @staticmethod
    def whole(projection: Tensor | None, heads: int) -> "Matrix":
        """A projection (M, d) or (H_kv, M, d) as float32."""
        if projection is None:
            return Matrix(None, 0)
        return Matrix(projection.expand(heads, -1, -1).to(torch.float32).contiguous(), 0)

    def buffer(self, dtype: torch.dtype, like: Tensor) -> Tensor:
        """For two terms in `dtype`; empty where one is enough."""
        if self.terms is None or dtype == torch.float32:
            return like.new_empty(0)
        return self.terms.new_empty(2, *self.terms.shape, dtype=dtype)

    def fill(self, buffer: Tensor) -> None:
        """Write into a `buffer` its values, and what rounding took off them.

        An exponent of size 30 must not be off by the 2^-9 of bfloat16; two terms bring that to 2^-17, on tensor cores.
        """
        if buffer.numel():
            torch.sub(self.terms, buffer[0].copy_(self.terms), out=buffer[1])

    def split(self, buffer: Tensor) -> "Matrix":
        """The same as the terms in a `buffer` that is filled."""
        return Matrix(buffer, buffer.stride(0)) if buffer.numel() else self


class SequenceInfo(NamedTuple):
    """Where the tokens of a sequence are, and how many there are."""

    starts: Any
    """(B, N) int32, the place where each token's document starts; None of sequences that hold one."""

    start: int
    """The place where the one document starts."""

    ends: Any
    """(B, N / b) int32: where the landmarks of each b tokens stand, negative where there are none; None of keys that
    are tokens, and of landmarks at the last of their b."""

    heads: int
    """Of keys."""

    length: int
    """Tokens, among which queries and keys have their places."""

    queries: int
    keys: int
    decay: Any = None
    """`decay.Decay` of a state that decays."""


class Tiling(NamedTuple):
    """How sequences are cut, at compile time."""

    segment: int
    """Tokens between two states in memory."""

    chunk: int
    """Rows of the tile whose sums a program holds."""

    block: int
    """Rows that it goes by."""

    group: int
    """Queries of a key."""

    values: int
    padded_values: int
    keys: int
    """Of a position in a mixture; 0 says that it has one and no prior."""

    causal: bool
    block_size: int = 1
    """b: tokens that landmarks are of."""

    rank: int = 0
    """Landmarks of b tokens; 0: keys are tokens, which see themselves."""

    @property
    def padded_rank(self) -> int:
        """r as the power of two that a tile has."""
        return padded(self.rank)

    @property
    def span(self) -> int:
        """Keys between two states."""
        return self.segment // self.block_size * self.rank if self.rank else self.segment


class Tile(NamedTuple):
    """Where a program's tile of queries stands."""

    head: Any
    """Among the query heads of all sequences."""

    batch: Any
    query_head: Any
    """Of the sequence."""

    kv: Any
    """Its key head."""

    key_head: Any
    """The same among those of all sequences."""

    entry: Any
    """Of the state that enters the segment."""

    begin: Any
    """Of the segment, and `end`: its last query's place + 1."""

    end: Any
    at: Any
    """The first query of the tile, and `stop`: its last one's place + 1."""

    stop: Any
    rows: Any
    """Places (C,) of the queries, which may reach beyond `end`."""

    first: Any
    """Where the documents of the queries start, (C,)."""


@triton.jit
def tiles_of(length, SPAN: tl.constexpr, C: tl.constexpr):
    """Tiles of C in a sequence that is cut into segments of SPAN."""
    whole = length // SPAN
    return whole * ((SPAN + C - 1) // C) + tl.cdiv(length - whole * SPAN, C)


@triton.jit
def tile_of_program(length, SPAN: tl.constexpr, C: tl.constexpr):
    """Head, place of the tile of C, begin and end of its segment of SPAN, and the number of the latter.

    Tiles do not reach over the end of a segment: the last one of each may be short.
    """
    EACH: tl.constexpr = (SPAN + C - 1) // C
    tiles = tiles_of(length, SPAN, C)
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    segment = tile // EACH
    begin = segment * SPAN
    return head, begin + tile % EACH * C, begin, tl.minimum(begin + SPAN, length), segment


@triton.jit
def queries_of_program(seq, TILING: tl.constexpr):
    """The `Tile` of TILING.chunk queries that this program is for."""
    head, at, begin, end, segment = tile_of_program(seq.queries, TILING.segment, TILING.chunk)
    batch, query_head = head // (seq.heads * TILING.group), head % (seq.heads * TILING.group)
    kv = query_head // TILING.group
    key_head = batch * seq.heads + kv
    entry = key_head * tl.cdiv(seq.keys, TILING.span) + segment if TILING.causal else key_head
    rows, stop = at + tl.arange(0, TILING.chunk), tl.minimum(at + TILING.chunk, end)
    first = first_token(seq.starts, batch, rows, seq.length, seq.start)
    return Tile(head, batch, query_head, kv, key_head, entry, begin, end, at, stop, rows, first)


@triton.jit
def places_of_keys(keys, seq, batch, TILING: tl.constexpr):
    """The tokens that keys of these numbers (C,) stand at."""
    if TILING.rank == 0:
        places = keys
    elif seq.ends is None:
        places = keys // TILING.rank * TILING.block_size + (TILING.block_size - 1)
    else:
        blocks = seq.keys // TILING.rank
        own = tl.minimum(keys // TILING.rank, blocks - 1)
        places = tl.load(seq.ends + batch.to(tl.int64) * blocks + own)
    return places


@triton.jit
def first_key(token, TILING: tl.constexpr):
    """The number of the first key that belongs to the token at this place or later, a multiple of b."""
    return token if TILING.rank == 0 else token // TILING.block_size * TILING.rank


@triton.jit
def token_of(key, TILING: tl.constexpr):
    """The first token that the key of this number may stand at."""
    return key if TILING.rank == 0 else key // TILING.rank * TILING.block_size


@triton.jit
def keys_before(token, seq, TILING: tl.constexpr):
    """The number of keys behind which there is none that a token before `token` sees."""
    if TILING.rank == 0:
        keys = token
    elif seq.ends is None:
        keys = tl.maximum(token - 1, 0) // TILING.block_size * TILING.rank
    else:
        keys = tl.minimum(tl.cdiv(token, TILING.block_size) * TILING.rank, seq.keys)
    return keys


@triton.jit
def head_at(rows, batch, head):
    """Where the rows of a head begin."""
    return rows.pointer + (batch.to(tl.int64) * rows.batch + head.to(tl.int64) * rows.head)


@triton.jit
def matrix_of(matrix, kv, PHI: tl.constexpr):
    """Where the projection of a key head begins."""
    return None if matrix.terms is None else matrix.terms + kv * PHI.rows * PHI.width


@triton.jit
def features_at(tokens, batch, head, heads, length, end, at, C: tl.constexpr, PHI: tl.constexpr):
    """Features of C tokens of a head from `at` on: halves (C, MP) in the dtype of tokens, and logs (C,).

    Of a head of `length`; those from `end` on are 0, also where nobody has written them.
    """
    MP: tl.constexpr = PHI.padded_rows
    count = end - at
    place = (batch * heads + head).to(tl.int64) * length + at
    scales = tl.zeros((C,), tl.float32)
    if tokens.features is None:
        x = head_at(tokens.rows, batch, head) + tl.cast(at, tl.int64) * tokens.rows.row
        a, _b, _logs = phi(x, tokens.rows.row, count, None, 0, C, PHI)
        a = once(rounded(a, x.dtype.element_ty))
        b = a
    else:
        features = tokens.features + place * PHI.padded_features
        a = load_rows(features, PHI.padded_features, count, C, MP, MP)
        b = a
        if PHI.two:
            b = load_rows(features + MP, PHI.padded_features, count, C, MP, MP)
        if PHI.unbounded:
            rows = tl.arange(0, C)
            scales = tl.load(tokens.logs + place + rows, mask=rows < count, other=0.0)
    return a, b, scales


@triton.jit
def features_of_queries(tokens, seq, tile, TILING: tl.constexpr, PHI: tl.constexpr):
    """`features_at` of a tile of queries."""
    heads = seq.heads * TILING.group
    return features_at(
        tokens, tile.batch, tile.query_head, heads, seq.queries, tile.end, tile.at, TILING.chunk, PHI
    )


@triton.jit
def tile_rows(rows, tile):
    """Where the rows of a tile of queries begin."""
    return head_at(rows, tile.batch, tile.query_head) + tl.cast(tile.at, tl.int64) * rows.row


@triton.jit
def load_numbers(pointer, at, length, C: tl.constexpr):
    """C numbers from `at` on, zeros behind the last one."""
    rows = at + tl.arange(0, C)
    return tl.load(pointer + rows, mask=rows < length, other=0.0)


@triton.jit
def half_of_state(state, entry, half: tl.constexpr, PHI: tl.constexpr, VP: tl.constexpr):
    """Half a state: its tile (MP, VP), and its normalizer (MP,)."""
    m = half * PHI.padded_rows + tl.arange(0, PHI.padded_rows)
    f = entry.to(tl.int64) * PHI.padded_features + m
    return tl.load(state.sums + f[:, None] * VP + tl.arange(0, VP)[None, :]), tl.load(state.norms + f)


@triton.jit
def store_half_of_state(tile, norm, state, entry, half: tl.constexpr, PHI: tl.constexpr, VP: tl.constexpr):
    """The inverse of `half_of_state`."""
    m = half * PHI.padded_rows + tl.arange(0, PHI.padded_rows)
    f = entry.to(tl.int64) * PHI.padded_features + m
    places = state.sums + f[:, None] * VP + tl.arange(0, VP)[None, :]
    tl.store(places, rounded(tile, state.sums.dtype.element_ty))
    tl.store(state.norms + f, norm)

"""Capabilities and costs of each mechanism, without torch.

Causality, context-parallel exchanges, block size, decoding state and FLOPs. Configuration checks, the layer builder,
the FLOP count and the catalogue read them here; none of them knows a mechanism by name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from .algebra import (
    Algebra,
    Bigbird,
    Compression,
    Eva,
    Informer,
    LinformerCompression,
    Near,
    Nystromformer,
    PoolCompression,
    Reformer,
    SimpleGla,
    Skyformer,
)
from .feature_map import FeatureMap

ExchangeKind = Literal["state", "halo", "heads", "heads or ring", "landmarks", "tokens"]

INVERSE_STEPS = 6
PRODUCTS_PER_STEP = 4

BLOCKS_OF_GROUP = 64
"""Blocks of a group of a `selection` with two levels."""


class LayerShape(NamedTuple):
    """The sizes of a layer that its costs depend on."""

    heads: int
    kv_heads: int
    head_dim: int
    """d, the width of a head."""

    hidden_size: int = 0
    """Width of the layer's input."""

    causal: bool = True
    seq_len: int = 1
    """N, tokens per sequence."""


Parts = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A mechanism with the settings of one layer. Optional texts are reasons; None: the limitation does not exist."""

    layer: str
    """Path of its class below `megakernel`: in `attention`, or in the folder of a paper in `papers`."""

    causal_layer: str | None = None
    """The class for causal models, if it is another one."""

    exchanges: tuple[ExchangeKind, ...]
    """What context-parallel shards exchange."""

    causal_exchanges: tuple[ExchangeKind, ...] | None = None
    """What they exchange in causal models, if it differs."""

    flops: Callable[[LayerShape], Parts]
    """Forward FLOPs per token of a layer's attention core, by part."""

    state_sizes: Callable[[LayerShape], tuple[int, int]] = lambda shape: (0, 0)
    """Numbers in the decoding state of a causal sequence: constant, and per token (0: the state never grows)."""

    further: int = 0
    """Numbers per token and key head that the layer needs from a further projection of the hidden state."""

    needs_rotary: str | None = None
    """Why the layer must rotate queries and keys itself; None if its caller can rotate them before."""

    block_size: int | None = None
    """Tokens per block; a context-parallel shard holds whole blocks."""

    mixes_future_tokens: str | None = None
    """Why tokens see later ones of their sequence, of any document."""

    mixes_documents: str | None = None
    """Why bidirectional tokens also see other documents of their sequence, besides `mixes_future_tokens`."""

    looks_back_only: str | None = None
    """Why the layer is causal only."""

    changes_constants: str | None = None
    """Why equal values for all tokens do not come out unchanged."""

    weighs_every_pair: bool = False
    """Whether a weight is computed for every pair of tokens, or with `window` for those within it."""

    keys_are_queries: bool = False
    """Whether the layer ignores its keys, because queries are compared with each other."""

    reads_other_keys: bool = False
    """Whether queries may read the keys of other tokens than their own, as in cross attention."""

    is_gated: bool = False
    """Whether FLuRKA's gate weighs the near window against the far context."""

    @property
    def name(self) -> str:
        """The module of its class, in words: `simple gla`."""
        return self.layer.split(".")[-2].replace("_", " ")

    def exchanged(self, causal: bool) -> tuple[ExchangeKind, ...]:
        """What context-parallel shards exchange in a causal or bidirectional layer."""
        return self.causal_exchanges if causal and self.causal_exchanges is not None else self.exchanges


def _nystrom(
    attention: Algebra, layer: str, count: int, iterative: bool = True, filtered: int = 0
) -> Mechanism:
    """Nyström approximation of the attention matrix by `count` landmarks of the sequence.

    FLOPs count matrix products (of distances too), not means. iterative: count the inverse; the exact one is for
    measurements and not counted. filtered: width of the convolution in tokens.
    """
    inverse = INVERSE_STEPS * PRODUCTS_PER_STEP * 2 * count**3 if iterative else 0

    def flops(shape: LayerShape) -> Parts:
        parts = {
            # Queries and keys times landmarks; values are gathered into the landmarks and read back.
            "landmarks": 2 * 2 * count * shape.head_dim,
            "readout": 2 * 2 * count * shape.head_dim,
            # Landmarks times landmarks, the inverse, and its product with the gathered values.
            "inverse": (2 * 2 * count * count * shape.head_dim + inverse) / shape.seq_len,
        }
        if filtered:
            parts["convolution"] = 2 * filtered * shape.head_dim
        return {name: shape.heads * part for name, part in parts.items()}

    return Mechanism(
        layer=layer,
        exchanges=("heads",),
        flops=flops,
        mixes_future_tokens=f"{attention.mechanism} draws landmarks from the whole sequence",
        changes_constants=f"{attention.mechanism} approximates the sum of its weights, too",
    )


def _skyformer(attention: Algebra) -> Mechanism:
    sky = attention.skyformer or Skyformer()
    iterative = sky.inverse == "iterative"
    return _nystrom(attention, "papers.skyformer.nystrom.SkyformerAttention", sky.features, iterative)


def _nystromformer(attention: Algebra) -> Mechanism:
    nystrom = attention.nystromformer or Nystromformer()
    layer, filtered = "papers.skyformer.nystrom.NystromformerAttention", nystrom.conv_kernel or 0
    return _nystrom(attention, layer, nystrom.landmarks, filtered=filtered)


def _bigbird(attention: Algebra) -> Mechanism:
    bigbird = attention.bigbird or Bigbird()
    read = (2 + bigbird.window_blocks + bigbird.random_blocks) * bigbird.block_size

    def flops(shape: LayerShape) -> Parts:
        pair = shape.heads * 4 * shape.head_dim
        return {
            "near": pair * min(read, shape.seq_len),
            # The queries of two blocks read all tokens.
            "global": pair * min(2 * bigbird.block_size, shape.seq_len),
        }

    return _sparse("bigbird", "divides the whole sequence into blocks", flops)


def _informer(attention: Algebra) -> Mechanism:
    informer = attention.informer or Informer()

    def flops(shape: LayerShape) -> Parts:
        top = informer.number(shape.seq_len)
        return {
            "samples": shape.heads * top * 2 * shape.head_dim,
            "chosen": shape.heads * top * 4 * shape.head_dim,
        }

    return _sparse("informer", "samples keys of the whole sequence", flops)


def _reformer(attention: Algebra) -> Mechanism:
    reformer = attention.reformer or Reformer()

    def flops(shape: LayerShape) -> Parts:
        seen = min(2 * reformer.chunk_size, shape.seq_len)
        return {
            "hashes": shape.heads * reformer.rounds * shape.head_dim * reformer.buckets,
            "chunks": shape.heads * reformer.rounds * seen * 4 * shape.head_dim,
        }

    return replace(_sparse("reformer", "sorts the whole sequence", flops), keys_are_queries=True)


def _sparse(name: str, reason: str, flops: Callable[[LayerShape], Parts]) -> Mechanism:
    """A bidirectional mechanism that computes some of the weights of softmax exactly."""
    return Mechanism(
        layer=f"papers.sparse.{name}.{name.title()}Attention",
        exchanges=("heads",),
        flops=flops,
        mixes_future_tokens=f"{name} {reason}",
    )


def _eva(attention: Algebra) -> Mechanism:
    eva = attention.eva or Eva()
    window, chunk = eva.window_size, eva.chunk_size

    def flops(shape: LayerShape) -> Parts:
        if not shape.causal:
            return _eva_parts(shape, chunk, -(-shape.seq_len // chunk), window * (3 if eva.overlap else 1))
        near = mean_local_keys(shape.seq_len, window, 2 if eva.overlap else 1)
        return _eva_parts(shape, chunk, mean_complete_blocks(shape.seq_len, chunk, 1), near)

    tail = max(window * (2 if eva.overlap else 1), chunk)
    return Mechanism(
        layer="papers.flurka.eva.EvaAttention",
        causal_layer="papers.flurka.eva.CausalEvaAttention",
        exchanges=("heads",),
        causal_exchanges=("halo", "landmarks"),
        flops=flops,
        state_sizes=lambda shape: (
            3 * shape.heads * shape.head_dim * tail,
            2 * shape.heads * shape.head_dim // chunk,
        ),
        block_size=math.lcm(window, chunk),
        mixes_documents="bidirectional eva divides a sequence, not its documents, into windows and chunks",
    )


def _eva_parts(shape: LayerShape, chunk: int, chunks: float, near: float, share: float = 1.0) -> Parts:
    """FLOPs of queries that see `near` keys and `chunks` summaries of `chunk` queries each; share: keys per token."""
    size = shape.head_dim
    return {
        # W times the two means of a chunk, then scores and weighted values of every key.
        "summaries": shape.heads * (4 * size * size / chunk + share * 4 * size),
        "near": shape.heads * near * 4 * size,
        "far": shape.heads * chunks * 4 * size,
    }


def _simple_gla(attention: Algebra) -> Mechanism:
    """Recurrent state with decay; FLOPs are those of the recurrence, not of its form in chunks of 64 tokens."""
    settings = attention.simple_gla or SimpleGla()
    corrects = settings.update == "delta"
    return Mechanism(
        layer="attention.gated_delta.GatedDeltaAttention"
        if corrects
        else "attention.simple_gla.SimpleGlaAttention",
        exchanges=("state",),
        flops=lambda shape: {
            # The delta rule first reads the old value from the state.
            "state": shape.kv_heads * (1 + corrects) * 2 * shape.head_dim**2,
            "readout": shape.heads * 2 * shape.head_dim**2,
        },
        state_sizes=lambda shape: (shape.kv_heads * shape.head_dim**2, 0),
        further=(settings.decay in ("gate", "step")) + corrects,
        looks_back_only="a state that decays looks back only",
        changes_constants="simple_gla divides by no sum of weights",
    )


def _low_rank(attention: Algebra) -> Mechanism:
    """Every query sees all landmarks of its sequence, under softmax or a kernel, or as EVA's chunks."""
    compression = attention.compression
    assert compression is not None
    window = (attention.eva or Eva()).window_size if attention.mechanism == "eva" else None

    def flops(shape: LayerShape) -> Parts:
        share = landmarks_per_token(compression, shape.seq_len)
        parts = {"landmarks": _compression_flops(attention, shape)}
        if window is not None:
            chunks = -(-shape.seq_len // window)
            return parts | _eva_parts(shape, window, chunks, share * shape.seq_len / chunks, share)
        if attention.feature_map is None:
            pair = 2 * (attention.keys_at_position + 1) * shape.head_dim
            return parts | {"far": shape.heads * share * shape.seq_len * pair}
        return parts | _state_flops(attention.feature_map, shape, attention.keys_at_position * share, share)

    linformer = compression.kind == "linformer"
    return Mechanism(
        layer="attention.low_rank.LowRankAttention"
        if window is None
        else "papers.flurka.eva.FlurkaEvaAttention",
        exchanges=("landmarks",) if window is None else ("landmarks", "heads"),
        flops=flops,
        block_size=getattr(compression, "block_size", None),
        needs_rotary=_rotates_itself(attention),
        mixes_future_tokens=f"{compression.kind} without a near window mixes future tokens into its landmarks",
        changes_constants="rows of linformer's F need not add up to 1" if linformer else None,
    )


def _near_far(attention: Algebra) -> Mechanism:
    """Exact window and landmarks of the blocks before it, weighed by phi (FLuRKA) or softmax (causal Linformer)."""
    near, phi, keys = attention.near, attention.feature_map, attention.keys_at_position
    assert near is not None
    assert attention.compression is not None
    rank = getattr(attention.compression, "rank", 1)
    block = getattr(attention.compression, "block_size", 1)
    gated = (near.kind, near.join) == ("softmax", "gated")

    def flops(shape: LayerShape) -> Parts:
        pair = 2 * (keys + 1) * shape.head_dim
        parts = {"landmarks": _compression_flops(attention, shape)}
        if phi is None:
            far = rank * mean_complete_blocks(shape.seq_len, block, near.blocks)
            parts["far"] = far * (shape.heads * pair)
        else:
            by_phi, share = near.kind == "kernel", rank / block
            parts |= _state_flops(phi, shape, keys * (share + by_phi), share)
            if by_phi:
                pair = 2 * phi.width(shape.head_dim) + 2 * (shape.head_dim + 1)
        parts["near"] = shape.heads * mean_local_keys(shape.seq_len, block, near.blocks) * pair
        if gated and near.gate == "token":
            parts["gate"] = shape.heads * 2 * shape.head_dim
        return parts

    def state_sizes(shape: LayerShape) -> tuple[int, int]:
        width = shape.kv_heads * shape.head_dim
        tail = (attention.keys_per_head + 1) * width * block * near.blocks
        if phi is None:
            return tail, (keys + 1) * width * rank // block
        return tail + shape.kv_heads * phi.width(shape.head_dim) * (shape.head_dim + 1), 0

    return Mechanism(
        layer="attention.landmark.LandmarkAttention" if phi is None else "attention.flurka.FlurkaAttention",
        exchanges=("halo", "landmarks" if phi is None else "state"),
        flops=flops,
        state_sizes=state_sizes,
        block_size=getattr(attention.compression, "block_size", None),
        needs_rotary=_rotates_itself(attention),
        looks_back_only=_looks_back(near),
        is_gated=gated and phi is not None,
        further=1 if attention.far_decay == "gate" else 0,
    )


def _local(attention: Algebra) -> Mechanism:
    """Softmax over a window of blocks alone."""
    near = attention.near
    assert near is not None
    block = near.block_size or 1

    def flops(shape: LayerShape) -> Parts:
        keys = mean_local_keys(shape.seq_len, block, near.blocks)
        return {"near": shape.heads * keys * 2 * (attention.keys_at_position + 1) * shape.head_dim}

    return Mechanism(
        layer="attention.softmax.LocalAttention",
        exchanges=("halo",),
        flops=flops,
        state_sizes=lambda shape: (
            shape.kv_heads * (attention.keys_per_head + 1) * shape.head_dim * block * near.blocks,
            0,
        ),
        block_size=near.block_size,
        looks_back_only=_looks_back(near),
    )


def _selected(attention: Algebra) -> Mechanism:
    """Softmax over a window of blocks and the earlier blocks that landmarks choose, alone or as FLuRKA's window."""
    near, selection = attention.near, attention.selection
    assert near is not None
    assert selection is not None
    is_flurka = attention.compression is not None
    without = (_near_far if is_flurka else _local)(attention)
    block, rank = without.block_size or 1, attention.landmarks_of_block
    chosen, by_tile = selection.blocks, selection.unit == "tile"

    def flops(shape: LayerShape) -> Parts:
        scored = mean_complete_blocks(shape.seq_len, block, near.blocks)
        if selection.levels == 2:
            scored = mean_scored_in_groups(shape.seq_len, block, near.blocks, chosen)
        read = block * mean_chosen_blocks(shape.seq_len, block, near.blocks, chosen)
        landmarks = shape.kv_heads * 2 * shape.head_dim * (rank if is_flurka else 1)
        return without.flops(shape) | {
            # FLuRKA's kernels and the choice each make the landmarks of keys.
            "choice": landmarks
            + shape.heads * scored * rank * 2 * shape.head_dim / (block if by_tile else 1),
            "chosen": shape.heads * read * 4 * shape.head_dim,
        }

    def state_sizes(shape: LayerShape) -> tuple[int, int]:
        constant = without.state_sizes(shape)[0] if is_flurka else 0
        of_groups = min(rank, BLOCKS_OF_GROUP) / BLOCKS_OF_GROUP if selection.levels == 2 else 0.0
        landmarks = rank + of_groups  # of a block
        width = 2 * shape.head_dim + math.ceil(landmarks * shape.head_dim / block)
        return constant + (shape.kv_heads * chosen if by_tile else 0), shape.kv_heads * width

    return replace(
        without,
        layer="attention.selected.FlurkaSelectedAttention"
        if is_flurka
        else "attention.selected.SelectedAttention",
        exchanges=("halo", "state", "landmarks", "tokens") if is_flurka else ("halo", "landmarks", "tokens"),
        flops=flops,
        state_sizes=state_sizes,
        needs_rotary="makes landmarks of unrotated keys, and without rotation its window has no order",
        looks_back_only="a choice among earlier blocks looks back only",
    )


def _rotates_itself(attention: Algebra) -> str | None:
    """Why a layer with compression rotates queries and keys itself; None if its callers can, or nothing is rotated."""
    if attention.far_rope == "centroid":
        return "rotates landmarks to the centers of their blocks (far_rope: centroid)"
    if attention.near is not None and attention.near.kind == "softmax":
        return "compresses unrotated keys, and without rotation its window has no order"
    return None


def _looks_back(near: Near) -> str:
    return f"a near window of kind: {near.kind} looks back only"


def _kernel(attention: Algebra) -> Mechanism:
    """phi(q).phi(k) with a running sum as state."""
    phi = attention.feature_map or FeatureMap(name="elu")
    return Mechanism(
        layer="attention.kernel.KernelAttention",
        reads_other_keys=True,
        exchanges=("state",),
        flops=lambda shape: _state_flops(phi, shape, attention.keys_at_position, 1),
        state_sizes=lambda shape: (shape.kv_heads * phi.width(shape.head_dim) * (shape.head_dim + 1), 0),
    )


def _every_pair(attention: Algebra) -> Mechanism:
    """Quadratic attention: softmax, optionally in a sliding window, a Gaussian kernel, or M keys per position."""
    window, keys = attention.window, attention.keys_at_position
    plain = attention.similarity == "softmax" and attention.mixture is None

    def flops(shape: LayerShape) -> Parts:
        seen = mean_local_keys(shape.seq_len, shape.seq_len, 1) if shape.causal else shape.seq_len
        if window is not None:
            seen = mean_last_keys(shape.seq_len, window)
        # One product for each key of a position, and one for the value.
        return {"near": shape.heads * seen * 2 * (keys + 1) * shape.head_dim}

    def state_sizes(shape: LayerShape) -> tuple[int, int]:
        # Keys whose variance is learned have two more numbers each.
        per_token = ((keys + 1) * shape.head_dim + 2 * keys * attention.learns_variances) * shape.kv_heads
        return (0, per_token) if window is None else (per_token * (window - 1), 0)

    return Mechanism(
        layer="attention.softmax.SoftmaxAttention"
        if plain
        else "papers.mixture_keys.pairwise.PairwiseAttention",
        # Ring attention does not support softcap.
        exchanges=("heads or ring",) if plain and attention.softcap is None else ("heads",),
        flops=flops,
        state_sizes=state_sizes,
        weighs_every_pair=True,
        reads_other_keys=plain and window is None,
        looks_back_only=None if window is None else "a window of the last tokens looks back only",
        changes_constants=None if attention.normalize else "normalize: false divides by nothing",
    )


MECHANISMS: tuple[tuple[Callable[[Algebra], bool], Callable[[Algebra], Mechanism]], ...] = (
    (lambda attention: attention.mechanism == "skyformer", _skyformer),
    (lambda attention: attention.mechanism == "nystromformer", _nystromformer),
    (lambda attention: attention.mechanism == "bigbird", _bigbird),
    (lambda attention: attention.mechanism == "informer", _informer),
    (lambda attention: attention.mechanism == "reformer", _reformer),
    (lambda attention: attention.mechanism == "simple_gla", _simple_gla),
    (lambda attention: attention.mechanism == "eva" and attention.compression is None, _eva),
    (lambda attention: attention.compression is not None and attention.near is None, _low_rank),
    (lambda attention: attention.near is not None and attention.selection is not None, _selected),
    (lambda attention: attention.compression is not None, _near_far),
    (lambda attention: attention.near is not None, _local),
    (lambda attention: attention.similarity == "kernel", _kernel),
    (lambda attention: True, _every_pair),
)
"""(condition on a layer's settings, builder); the first whose condition holds applies."""


def mechanism_of(attention: Algebra) -> Mechanism:
    """The mechanism that a layer's settings describe."""
    return next(build for matches, build in MECHANISMS if matches(attention))(attention)


def mean_local_keys(seq_len: int, block_size: int, blocks: int) -> float:
    """Mean keys per token in its current block up to itself and the `blocks` - 1 blocks before it.

    With block_size = seq_len this is (N + 1) / 2, full causal attention.
    """
    whole, rest = divmod(seq_len, block_size)
    current = whole * block_size * (block_size + 1) / 2 + rest * (rest + 1) / 2
    before = (blocks - 1) * max(seq_len - block_size, 0) * block_size
    return (current + before) / seq_len


def mean_last_keys(seq_len: int, window: int) -> float:
    """Mean keys per token in a sliding window of `window` tokens, its own included."""
    seen = min(seq_len, window)
    return (seen * (seen + 1) / 2 + (seq_len - seen) * seen) / seq_len


def mean_complete_blocks(seq_len: int, size: int, skipped: int) -> float:
    """Mean complete blocks of `size` tokens before a token's current block and the `skipped` - 1 blocks before it."""
    whole, rest = divmod(seq_len, size)
    seen = [max(0, block - skipped + 1) for block in range(whole + 1)]
    return (size * sum(seen[:whole]) + rest * seen[whole]) / seq_len


def mean_chosen_blocks(seq_len: int, size: int, skipped: int, count: int) -> float:
    """Mean blocks that a token reads of the complete ones of `mean_complete_blocks`, at most `count`."""
    whole, rest = divmod(seq_len, size)
    seen = [min(count, max(0, block - skipped + 1)) for block in range(whole + 1)]
    return (size * sum(seen[:whole]) + rest * seen[whole]) / seq_len


def mean_scored_in_groups(seq_len: int, size: int, skipped: int, count: int) -> float:
    """Mean groups and blocks that a token scores if at most `count` groups of blocks are searched."""
    total = 0
    for block in range(-(-seq_len // size)):
        groups, rest = divmod(max(0, block - skipped + 1), BLOCKS_OF_GROUP)
        scored = min(groups, count) * BLOCKS_OF_GROUP + rest + (groups if groups > count else 0)
        total += scored * min(size, seq_len - block * size)
    return total / seq_len


def landmarks_per_token(compression: Compression, seq_len: int) -> float:
    """L / N: compressed keys per token of a sequence of N tokens."""
    if isinstance(compression, LinformerCompression):
        return compression.rank / seq_len
    rank = 1 if isinstance(compression, PoolCompression) else compression.rank
    return rank * -(-seq_len // compression.block_size) / seq_len


def _compression_flops(attention: Algebra, shape: LayerShape) -> float:
    """Forward FLOPs per token of E x and F x: every token contributes to all landmarks of its block or sequence."""
    compression = attention.compression
    assert compression is not None
    rank = 1 if isinstance(compression, PoolCompression) else compression.rank
    if not attention.compresses_input:
        return shape.kv_heads * rank * 2 * (attention.keys_per_head + 1) * shape.head_dim
    matrices = 1 if getattr(compression, "share_kv", True) else 2
    return matrices * rank * 2 * shape.hidden_size


def _state_flops(phi: FeatureMap, shape: LayerShape, mapped_keys: float, written: float) -> Parts:
    """FLOPs per token of phi and of a state to which `written` keys per token and key head are added."""
    one_state = 2 * phi.width(shape.head_dim) * (shape.head_dim + 1)
    return {
        "feature_map": (shape.heads + shape.kv_heads * mapped_keys) * _mapping_flops(phi, shape.head_dim),
        "state": shape.kv_heads * written * one_state,
        "readout": shape.heads * one_state,
    }


def _mapping_flops(feature_map: FeatureMap, head_dim: int) -> float:
    """FLOPs of phi's projection, if it has one, for one vector of one head.

    Computing the frequencies omega is not counted: it happens once per micro-batch. FastFood's transform replaces a
    matrix product, so all its multiplications and additions count: 3 n + 2 n log2 n per block of n.
    """
    if feature_map.kind == "fastfood":
        exponent = (head_dim - 1).bit_length()
        blocks = feature_map.sample_count(head_dim) // head_dim
        return blocks * 2**exponent * (3 + 2 * exponent)
    rows = head_dim if feature_map.name == "hedgehog" else feature_map.frequencies(head_dim)
    return 2 * head_dim * rows

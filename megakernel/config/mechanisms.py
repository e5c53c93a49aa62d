"""What each mechanism can do, said once and without torch.

Whether tokens see later ones, what shards of a sequence exchange, its blocks, what it carries from token to token, and
its operations. Checks of a configuration, the builder of layers, the count of FLOPs and the catalogue ask here; none of
them knows a mechanism by name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .algebra import (
    Algebra,
    Compression,
    Eva,
    LinformerCompression,
    Near,
    Nystromformer,
    PoolCompression,
    SimpleGla,
    Skyformer,
)
from .feature_map import FeatureMap

ExchangeKind = Literal["state", "halo", "heads", "heads or ring", "landmarks"]

INVERSE_STEPS = 6
PRODUCTS_PER_STEP = 4


class Shape(NamedTuple):
    """A layer as its numbers are counted."""

    heads: int
    kv_heads: int
    size: int
    """d, the width of a head."""

    width: int = 0
    """Of the layer's input."""

    causal: bool = True
    length: int = 1
    """N, tokens of a sequence."""


Parts = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A mechanism with the settings of one layer. Reasons are texts; None says that there is none."""

    layer: str
    """Module below `megakernel.attention` and class in it."""

    causal_layer: str | None = None
    """The same of tokens that see no later ones, where that is another class."""

    exchanges: tuple[ExchangeKind, ...]
    """What shards of a sequence exchange."""

    causal_exchanges: tuple[ExchangeKind, ...] | None = None
    """The same of tokens that see no later ones, where that is something else."""

    flops: Callable[[Shape], Parts]
    """Forward FLOPs per token of a layer's attention core, by part."""

    state_sizes: Callable[[Shape], tuple[int, int]] = lambda shape: (0, 0)
    """Numbers that a causal sequence carries from token to token, whatever its length, and what each token adds.

    Where no token adds any, the sequence continues from a state of constant size.
    """

    further: int = 0
    """Numbers of each token and key head that the layer wants of a further projection of the hidden state."""

    block_size: int | None = None
    """Tokens of a block, which shards of a sequence hold whole."""

    mixes_future_tokens: str | None = None
    """Why a token sees later ones of its sequence, whatever document they belong to."""

    mixes_documents: str | None = None
    """Why tokens that see both ways also see other documents of their sequence, besides `mixes_future_tokens`."""

    looks_back_only: str | None = None
    """Why a token cannot see later ones of its document."""

    changes_constants: str | None = None
    """Why values that are all alike come out as something else."""

    weighs_every_pair: bool = False
    """Whether every token weighs every earlier one, at quadratic cost."""

    is_gated: bool = False
    """Whether a gate of FLuRKA weighs the near window against the far part."""

    def exchanged(self, causal: bool) -> tuple[ExchangeKind, ...]:
        """What shards of a sequence exchange in a layer that is or is not causal."""
        return self.causal_exchanges if causal and self.causal_exchanges is not None else self.exchanges


def _through_landmarks(
    form: Algebra, layer: str, count: int, iterative: bool = True, filtered: int = 0
) -> Mechanism:
    """Landmarks of whole sequences approximate one matrix; distances are counted as the products they are made of.

    iterative: of the exact inverse, which is for measurements, the products alone are counted. filtered: tokens under a
    convolution. Means are sums of tokens, no products.
    """
    inverse = INVERSE_STEPS * PRODUCTS_PER_STEP * 2 * count**3 if iterative else 0

    def flops(shape: Shape) -> Parts:
        parts = {
            # Queries and keys meet the landmarks; values go to them and come back.
            "landmarks": 2 * 2 * count * shape.size,
            "readout": 2 * 2 * count * shape.size,
            # Landmarks meet each other, and the inverse is applied to what they hold.
            "inverse": (2 * 2 * count * count * shape.size + inverse) / shape.length,
        }
        if filtered:
            parts["convolution"] = 2 * filtered * shape.size
        return {name: shape.heads * part for name, part in parts.items()}

    return Mechanism(
        layer=layer,
        exchanges=("heads",),
        flops=flops,
        mixes_future_tokens=f"{form.mechanism} draws landmarks from the whole sequence",
        changes_constants=f"{form.mechanism} approximates the sum of its weights, too",
    )


def _skyformer(form: Algebra) -> Mechanism:
    sky = form.skyformer or Skyformer()
    iterative = sky.inverse == "iterative"
    return _through_landmarks(form, "nystrom.SkyformerAttention", sky.features, iterative)


def _nystromformer(form: Algebra) -> Mechanism:
    nystrom = form.nystromformer or Nystromformer()
    layer, filtered = "nystrom.NystromformerAttention", nystrom.conv_kernel or 0
    return _through_landmarks(form, layer, nystrom.landmarks, filtered=filtered)


def _eva(form: Algebra) -> Mechanism:
    """Exact windows, and summaries of chunks."""
    eva = form.eva or Eva()
    window, chunk = eva.window_size, eva.chunk_size

    def flops(shape: Shape) -> Parts:
        if not shape.causal:
            return _eva_parts(shape, chunk, -(-shape.length // chunk), window * (3 if eva.overlap else 1))
        near = mean_local_keys(shape.length, window, 2 if eva.overlap else 1)
        return _eva_parts(shape, chunk, mean_complete_blocks(shape.length, chunk, 1), near)

    tail = max(window * (2 if eva.overlap else 1), chunk)
    return Mechanism(
        layer="eva.EvaAttention",
        causal_layer="eva.CausalEvaAttention",
        exchanges=("heads",),
        causal_exchanges=("halo", "landmarks"),
        flops=flops,
        state_sizes=lambda shape: (
            3 * shape.heads * shape.size * tail,
            2 * shape.heads * shape.size // chunk,
        ),
        block_size=math.lcm(window, chunk),
        mixes_documents="eva that sees both ways cuts a sequence, not its documents, into windows and chunks",
    )


def _eva_parts(shape: Shape, chunk: int, chunks: float, near: float, share: float = 1.0) -> Parts:
    """Of queries that meet `near` keys and `chunks` summaries of `chunk` queries each; share: keys per token."""
    size = shape.size
    return {
        # W of the two means of a chunk, then scores and weighted values of every key.
        "summaries": shape.heads * (4 * size * size / chunk + share * 4 * size),
        "near": shape.heads * near * 4 * size,
        "far": shape.heads * chunks * 4 * size,
    }


def _simple_gla(form: Algebra) -> Mechanism:
    """A state that decays, as kernel attention's with phi the identity; chunks of 64 tokens are not counted."""
    settings = form.simple_gla or SimpleGla()
    corrects = settings.update == "delta"
    return Mechanism(
        layer="gated_delta.GatedDeltaAttention" if corrects else "simple_gla.SimpleGlaAttention",
        exchanges=("state",),
        flops=lambda shape: {
            # A correction is read off the state first.
            "state": shape.kv_heads * (1 + corrects) * 2 * shape.size**2,
            "readout": shape.heads * 2 * shape.size**2,
        },
        state_sizes=lambda shape: (shape.kv_heads * shape.size**2, 0),
        further=(settings.decay in ("gate", "step")) + corrects,
        looks_back_only="a state that decays looks back only",
        changes_constants="simple_gla divides by no sum of weights",
    )


def _low_rank(form: Algebra) -> Mechanism:
    """Every query meets the same landmarks of its sequence, under softmax or a kernel, or as EVA's chunks."""
    compression = form.compression
    assert compression is not None
    window = (form.eva or Eva()).window_size if form.mechanism == "eva" else None

    def flops(shape: Shape) -> Parts:
        share = landmarks_per_token(compression, shape.length)
        parts = {"landmarks": _compression_flops(form, shape)}
        if window is not None:
            chunks = -(-shape.length // window)
            return parts | _eva_parts(shape, window, chunks, share * shape.length / chunks, share)
        if form.feature_map is None:
            pair = 2 * (form.keys_at_position + 1) * shape.size
            return parts | {"far": shape.heads * share * shape.length * pair}
        return parts | _state_flops(form.feature_map, shape, form.keys_at_position * share, share)

    linformer = compression.kind == "linformer"
    return Mechanism(
        layer="low_rank.LowRankAttention" if window is None else "eva.FlurkaEvaAttention",
        exchanges=("landmarks",) if window is None else ("landmarks", "heads"),
        flops=flops,
        block_size=getattr(compression, "block_size", None),
        mixes_future_tokens=f"{compression.kind} without a near window mixes future tokens into its landmarks",
        changes_constants="rows of linformer's F need not add up to 1" if linformer else None,
    )


def _near_far(form: Algebra) -> Mechanism:
    """A window attended exactly, and landmarks of the blocks before it, under phi (FLuRKA) or softmax (its parent).

    FLuRKA's window is under softmax or phi.
    """
    near, phi, keys = form.near, form.feature_map, form.keys_at_position
    assert near is not None
    assert form.compression is not None
    rank = getattr(form.compression, "rank", 1)
    block = getattr(form.compression, "block_size", 1)
    gated = (near.kind, near.join) == ("softmax", "gated")

    def flops(shape: Shape) -> Parts:
        pair = 2 * (keys + 1) * shape.size
        parts = {"landmarks": _compression_flops(form, shape)}
        if phi is None:
            far = rank * mean_complete_blocks(shape.length, block, near.blocks)
            parts["far"] = far * (shape.heads * pair)
        else:
            by_phi, share = near.kind == "kernel", rank / block
            parts |= _state_flops(phi, shape, keys * (share + by_phi), share)
            if by_phi:
                pair = 2 * phi.width(shape.size) + 2 * (shape.size + 1)
        parts["near"] = shape.heads * mean_local_keys(shape.length, block, near.blocks) * pair
        if gated and near.gate == "token":
            parts["gate"] = shape.heads * 2 * shape.size
        return parts

    def state_sizes(shape: Shape) -> tuple[int, int]:
        width = shape.kv_heads * shape.size
        tail = (form.keys_per_head + 1) * width * block * near.blocks
        if phi is None:
            return tail, (keys + 1) * width * rank // block
        return tail + shape.kv_heads * phi.width(shape.size) * (shape.size + 1), 0

    return Mechanism(
        layer="landmark.LandmarkAttention" if phi is None else "flurka.FlurkaAttention",
        exchanges=("halo", "landmarks" if phi is None else "state"),
        flops=flops,
        state_sizes=state_sizes,
        block_size=getattr(form.compression, "block_size", None),
        looks_back_only=_looks_back(near),
        is_gated=gated and phi is not None,
        further=1 if form.far_decay == "gate" else 0,
    )


def _local(form: Algebra) -> Mechanism:
    """Softmax over a window of blocks alone."""
    near = form.near
    assert near is not None
    block = near.block_size or 1

    def flops(shape: Shape) -> Parts:
        keys = mean_local_keys(shape.length, block, near.blocks)
        return {"near": shape.heads * keys * 2 * (form.keys_at_position + 1) * shape.size}

    return Mechanism(
        layer="softmax.LocalAttention",
        exchanges=("halo",),
        flops=flops,
        state_sizes=lambda shape: (
            shape.kv_heads * (form.keys_per_head + 1) * shape.size * block * near.blocks,
            0,
        ),
        block_size=near.block_size,
        looks_back_only=_looks_back(near),
    )


def _looks_back(near: Near) -> str:
    return f"a near window of kind: {near.kind} looks back only"


def _kernel(form: Algebra) -> Mechanism:
    """phi(q).phi(k) with a running sum as state."""
    phi = form.feature_map or FeatureMap(name="elu")
    return Mechanism(
        layer="kernel.KernelAttention",
        exchanges=("state",),
        flops=lambda shape: _state_flops(phi, shape, form.keys_at_position, 1),
        state_sizes=lambda shape: (shape.kv_heads * phi.width(shape.size) * (shape.size + 1), 0),
    )


def _every_pair(form: Algebra) -> Mechanism:
    """Every pair weighed: softmax over the tokens in sight, or a distance, or M keys at a position."""
    window, keys = form.window, form.keys_at_position
    plain = form.similarity == "softmax" and form.mixture is None

    def flops(shape: Shape) -> Parts:
        seen = mean_local_keys(shape.length, shape.length, 1) if shape.causal else shape.length
        if window is not None:
            seen = mean_last_keys(shape.length, window)
        # One product for each key of a position, and one for its value.
        return {"near": shape.heads * seen * 2 * (keys + 1) * shape.size}

    def state_sizes(shape: Shape) -> tuple[int, int]:
        per_token = (keys + 1) * shape.kv_heads * shape.size
        return (0, per_token) if window is None else (per_token * (window - 1), 0)

    return Mechanism(
        layer="softmax.SoftmaxAttention" if plain else "mixture.PairwiseAttention",
        # Ring attention knows no cap.
        exchanges=("heads or ring",) if plain and form.softcap is None else ("heads",),
        flops=flops,
        state_sizes=state_sizes,
        weighs_every_pair=True,
        looks_back_only=None if window is None else "a window of the last tokens looks back only",
        changes_constants=None if form.normalize else "normalize: false divides by nothing",
    )


MECHANISMS: tuple[tuple[Callable[[Algebra], bool], Callable[[Algebra], Mechanism]], ...] = (
    (lambda form: form.mechanism == "skyformer", _skyformer),
    (lambda form: form.mechanism == "nystromformer", _nystromformer),
    (lambda form: form.mechanism == "simple_gla", _simple_gla),
    (lambda form: form.mechanism == "eva" and form.compression is None, _eva),
    (lambda form: form.compression is not None and form.near is None, _low_rank),
    (lambda form: form.compression is not None, _near_far),
    (lambda form: form.near is not None, _local),
    (lambda form: form.similarity == "kernel", _kernel),
    (lambda form: True, _every_pair),
)
"""Whether the settings of a layer name a mechanism, and what it then is; the first that says so does."""


def mechanism_of(form: Algebra) -> Mechanism:
    """The mechanism that the settings of a layer name."""
    return next(made for named, made in MECHANISMS if named(form))(form)


def mean_local_keys(seq_len: int, block_size: int, blocks: int) -> float:
    """Keys that a token attends exactly, on average: its current block up to itself, and `blocks` - 1 before it.

    With block_size = seq_len this is (N + 1) / 2, full causal attention.
    """
    whole, rest = divmod(seq_len, block_size)
    own = whole * block_size * (block_size + 1) / 2 + rest * (rest + 1) / 2
    before = (blocks - 1) * max(seq_len - block_size, 0) * block_size
    return (own + before) / seq_len


def mean_last_keys(seq_len: int, window: int) -> float:
    """Keys that a token attends on average where it sees the last `window` tokens, its own included."""
    seen = min(seq_len, window)
    return (seen * (seen + 1) / 2 + (seq_len - seen) * seen) / seq_len


def mean_complete_blocks(seq_len: int, size: int, skipped: int) -> float:
    """Blocks of `size` tokens that end before a token's own and the `skipped` - 1 before it, on average."""
    whole, rest = divmod(seq_len, size)
    seen = [max(0, block - skipped + 1) for block in range(whole + 1)]
    return (size * sum(seen[:whole]) + rest * seen[whole]) / seq_len


def landmarks_per_token(compression: Compression, seq_len: int) -> float:
    """L / N, compressed keys of one sequence of N tokens over its tokens."""
    if isinstance(compression, LinformerCompression):
        return compression.rank / seq_len
    rank = 1 if isinstance(compression, PoolCompression) else compression.rank
    return rank * -(-seq_len // compression.block_size) / seq_len


def _compression_flops(form: Algebra, shape: Shape) -> float:
    """Forward FLOPs per token of E x and F x: every token takes part in the landmarks of its block or sequence."""
    compression = form.compression
    assert compression is not None
    rank = 1 if isinstance(compression, PoolCompression) else compression.rank
    if not form.compresses_input:
        return shape.kv_heads * rank * 2 * (form.keys_per_head + 1) * shape.size
    matrices = 1 if getattr(compression, "share_kv", True) else 2
    return matrices * rank * 2 * shape.width


def _state_flops(phi: FeatureMap, shape: Shape, mapped_keys: float, written: float) -> Parts:
    """Operations of phi, and of a state that `written` keys per token and key head enter and every query reads."""
    one_state = 2 * phi.width(shape.size) * (shape.size + 1)
    return {
        "feature_map": (shape.heads + shape.kv_heads * mapped_keys) * _mapping_flops(phi, shape.size),
        "state": shape.kv_heads * written * one_state,
        "readout": shape.heads * one_state,
    }


def _mapping_flops(feature_map: FeatureMap, head_dim: int) -> float:
    """FLOPs of phi for one vector of one head: its projection, if it has one.

    The frequencies omega themselves are made once for all tokens of a micro-batch, and are not counted. Of FastFood,
    whose transform takes the place of a matrix product, every multiplication and addition is: 3 n + 2 n log2 n for
    each block of n.
    """
    if feature_map.kind == "fastfood":
        exponent = (head_dim - 1).bit_length()
        blocks = feature_map.sample_count(head_dim) // head_dim
        return blocks * 2**exponent * (3 + 2 * exponent)
    rows = head_dim if feature_map.name == "hedgehog" else feature_map.frequencies(head_dim)
    return 2 * head_dim * rows

"""Sections of an attention mechanism: similarity, compression, near window, and mechanisms outside this algebra.

The algebra is that of docs/formulas.md, 1.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from .errors import Problem
from .feature_map import FeatureMap
from .section import Section


class _Compression(Section):
    compress: Literal["input", "projected"] | None = None
    """E and F compress the layer's `input` (FLuRKA eq. 2, cheaper) or its `projected` keys and values (eq. 1); None:
    `input`, or `projected` with a near window or per_head."""


class _LearnedCompression(_Compression):
    per_head: bool = False
    """Learn one (E, F) per key head instead of one for all heads of the layer."""

    share_kv: bool = False
    """Use E for the values too, instead of learning F."""

    def problems(self) -> Iterator[Problem]:
        """One E for all heads that is also one per head."""
        if self.compress == "input" and self.per_head:
            reason = "has one E for all heads of a layer, and per_head gives each its own"
            yield self.problem("compress", reason, "set compress: projected or remove per_head")


class BlockCompression(_LearnedCompression):
    """Each block of `block_size` tokens is compressed to `rank` landmarks: k~ = E k_block, v~ = F v_block."""

    kind: Literal["block"] = "block"
    """`block` has these keys. `pool`, with block_size alone, takes means of blocks. `linformer`, without block_size,
    compresses the whole sequence to `rank` landmarks; it is for encoders, in which all layers with this compression
    use one E and F with `share_layers: true`."""

    block_size: int = Field(default=64, gt=0)
    """Tokens per block, b. Larger blocks mean fewer landmarks, a longer near window and a coarser far context."""

    rank: int = Field(default=8, gt=0, le=1_000_000)
    """Landmarks per block, r; at most block_size. More landmarks keep more of the block and cost more."""

    def problems(self) -> Iterator[Problem]:
        """More landmarks than tokens in a block, or an invalid `compress`."""
        if self.rank > self.block_size:
            yield self.problem(
                "rank", f"exceeds block_size={self.block_size}", f"set rank<={self.block_size}"
            )
        yield from super().problems()


class PoolCompression(_Compression):
    """Each block of `block_size` tokens is replaced by its mean."""

    kind: Literal["pool"]
    """How the sequence is compressed."""

    block_size: int = Field(default=64, gt=0)
    """Tokens per block, b."""


class LinformerCompression(_LearnedCompression):
    """A whole sequence is compressed to `rank` landmarks: E, F in R^(d_k x N), one column per position.

    N is model.max_positions, else training.seq_len; shorter sequences use the first columns.
    """

    kind: Literal["linformer"]
    """How the sequence is compressed."""

    rank: int = Field(default=256, gt=0, le=1_000_000)
    """Landmarks per sequence, d_k."""

    share_layers: bool = False
    """All layers with this compression use the E and F of the first of them (Linformer's layerwise sharing)."""


def _kind(value: Any) -> str:
    return value.get("kind", "block") if isinstance(value, dict) else getattr(value, "kind", "block")


Compression = Annotated[
    Annotated[BlockCompression, Tag("block")]
    | Annotated[PoolCompression, Tag("pool")]
    | Annotated[LinformerCompression, Tag("linformer")],
    Discriminator(_kind),
]
"""One of the three, selected by `kind`; without `kind`, `block`."""


class Mixture(Section):
    """M keys per position or landmark, whose weight is sum_r pi_r s(q, k_r).

    s is the layer's `similarity`; in the near window it is that of `near.kind`.
    """

    keys: int = Field(default=2, ge=2, le=1_000)
    """Keys per position, M."""

    kind: Literal["projected", "shifted"] = "projected"
    """`projected`: each key has its own projection. `shifted`: the keys share one projection, each with a learned
    shift (fewer parameters)."""

    estep: Literal["soft", "hard"] = "soft"
    """`soft`: a position's weight is the mean over its keys under priors pi. `hard`: that of its nearest key, no pi."""

    m_step: bool = False
    """After every step, set pi to the mean responsibility of each key instead of learning it by gradients."""

    sigma2: list[Annotated[float, Field(gt=0)]] | Literal["learned"] | None = None
    """Variance of each key in units of sqrt(head_dim), for similarity `gaussian`; `learned`: one for each head and key,
    initially 1; None: 1 for every key."""

    def problems(self) -> Iterator[Problem]:
        """Priors and variances without effect."""
        if self.m_step and self.estep == "hard":
            yield self.problem("m_step", "has no effect on estep: hard, which has no priors", "remove one")
        if isinstance(self.sigma2, list) and len(self.sigma2) != self.keys:
            reason = f"has {len(self.sigma2)} values for keys={self.keys}"
            yield self.problem("sigma2", reason, "write one value per key")


class Skyformer(Section):
    """Nyström approximation of kernelized attention from randomly sampled rows of [Q; K]."""

    features: int = Field(default=128, gt=0, le=1_000_000)
    """Landmarks sampled with replacement from the 2N queries and keys."""

    draw: Literal["uniform", "stratified"] = "uniform"
    """Sample landmarks `uniform`ly from queries and keys together, or `stratified`: half from each."""

    per_head: bool = True
    """Sample landmarks separately for each head; false: one sample for all heads of the layer."""

    inverse: Literal["iterative", "exact"] = "iterative"
    """`iterative`: six steps of matrix products on the matrix regularized by gamma. `exact`: pseudo-inverse (slow)."""

    gamma: float = Field(default=0.1, gt=0)
    """Added to the diagonal before the iterative inverse."""

    def problems(self) -> Iterator[Problem]:
        """A regularization of the exact inverse, which has none."""
        yield from self.without_effect("inverse", {"gamma": ("iterative",)})


class Nystromformer(Section):
    """Nyström approximation of softmax attention from segment means of queries and keys."""

    landmarks: int = Field(default=64, gt=0, le=1_000_000)
    """Segments per sequence; each gives one landmark query and one landmark key."""

    conv_kernel: int | None = Field(default=None, gt=0, le=1_000_000)
    """Width in tokens (odd) of a depthwise convolution of the values, added to the output; None: no convolution."""

    def problems(self) -> Iterator[Problem]:
        """A convolution that is not symmetric."""
        if self.conv_kernel is not None and self.conv_kernel % 2 == 0:
            reason, remedy = "has no middle token", f"set {self.conv_kernel - 1} or {self.conv_kernel + 1}"
            yield self.problem("conv_kernel", reason, remedy)


class Eva(Section):
    """Softmax over the keys in a token's window and one summary (k_c, beta_c) per chunk of keys."""

    window_size: int = Field(default=64, gt=0)
    """Tokens per window, w, attended exactly."""

    chunk_size: int = Field(default=16, gt=0)
    """Tokens per chunk. With compression, each window gets one chunk: an equal share of the compressed keys."""

    overlap: bool = False
    """Queries also see the keys of the previous window and, unless causal, of the next one."""

    exclude_window: bool = False
    """Hide the summaries of chunks inside a token's own window; the published form counts those keys twice."""

    published_padding: bool = False
    """Count padding as zeros in chunk means, as the published code does; outputs then depend on the padding."""


class Bigbird(Section):
    """Softmax over blocks: those around a query's block, random ones, and the first and last, which read everything."""

    block_size: int = Field(default=64, gt=0, le=1_000_000)
    """Tokens per block, b."""

    window_blocks: int = Field(default=3, gt=0, le=1_001)
    """Blocks of the window, an odd number: a query's own block in the middle."""

    random_blocks: int = Field(default=3, gt=0, le=1_000)
    """Random blocks that each block of queries reads, the same throughout a run; a layer's heads have their own."""

    def problems(self) -> Iterator[Problem]:
        """A window without a middle."""
        if self.window_blocks % 2 == 0:
            reason, remedy = (
                "has no middle block",
                f"set {self.window_blocks - 1} or {self.window_blocks + 1}",
            )
            yield self.problem("window_blocks", reason, remedy)


class Informer(Section):
    """Full attention for the queries with the largest max - mean of sampled scores; the mean value for the others."""

    factor: int = Field(default=5, gt=0, le=1_000_000)
    """c: queries that attend, and keys sampled for each query, are c ceil(ln N) of N tokens."""

    top: int | None = Field(default=None, gt=0, le=1_000_000)
    """Number of these queries and keys, whatever N is; None: as `factor` says."""

    def problems(self) -> Iterator[Problem]:
        """A factor beside a number."""
        if self.top is not None and self.is_set("factor"):
            yield self.problem("factor", f"has no effect beside top: {self.top}", "remove one")

    def number(self, length: int) -> int:
        """u: queries that attend, and keys sampled for each query, in a sequence of `length` tokens."""
        wanted = self.factor * math.ceil(math.log(length)) if self.top is None else self.top
        return max(1, min(length, wanted))


class Reformer(Section):
    """Softmax over the tokens of a query's chunk and of the one before it, after sorting by a random hash, in rounds.

    Queries are their own keys: the layer's key projection is not used.
    """

    rounds: int = Field(default=2, gt=0, le=1_000)
    """Hashes with rotations of their own, whose outputs are merged by their sums of weights."""

    buckets: int = Field(default=64, ge=2, le=1_000_000)
    """Buckets of a hash, an even number: N / chunk_size or a few times that fill chunks with tokens of one bucket."""

    chunk_size: int = Field(default=64, ge=2, le=1_000_000)
    """Tokens per chunk of the sorted sequence, m; a query sees up to 2m - 1 others in a round."""

    def problems(self) -> Iterator[Problem]:
        """Buckets that do not come in pairs."""
        if self.buckets % 2:
            reason, remedy = "does not divide into pairs", f"set {self.buckets - 1} or {self.buckets + 1}"
            yield self.problem("buckets", reason, remedy)


class SimpleGla(Section):
    """S_i = a_i S_(i-1) + k_i v_i^T and o_i = q_i^T S_i / sqrt(d), with one decay a_i in (0, 1] per key head."""

    update: Literal["sum", "delta"] = "sum"
    """`sum`: each token adds k_i v_i^T. `delta`: each token moves the value stored under k_i toward v_i, by a share
    projected from the layer's input; q_i and k_i are normalized to length 1 (gated DeltaNet)."""

    decay: Literal["gate", "step", "fixed", "none"] = "gate"
    """Decay a_i. `gate`: sigmoid(w.x_i + b). `step`: exp(-A t_i) with t_i = softplus(w.x_i + b), which also scales
    v_i under update `sum` (Mamba-2). `fixed`: 1 - 2^(-5-h) for key head h (RetNet). `none`: 1."""

    gate_logit_normalizer: float = Field(default=16.0, gt=0)
    """Divides log sigmoid(w.x_i + b) of decay `gate`; larger values forget more slowly."""

    def problems(self) -> Iterator[Problem]:
        """A normalizer without a gate."""
        yield from self.without_effect("decay", {"gate_logit_normalizer": ("gate",)})


class Near(Section):
    """The window that a token attends exactly: its current block and optionally the previous one, in its document."""

    kind: Literal["softmax", "kernel"] = "softmax"
    """Similarity in the window: `softmax` exp(q.k/sqrt(d)), or `kernel`: the layer's phi(q).phi(k) (pure FLuRKA)."""

    blocks: Literal[1, 2] = 1
    """Blocks in the window: 1: the current one; 2: also the previous one, for exact attention further back."""

    block_size: int | None = Field(default=None, gt=0)
    """Tokens per block of a layer without compression, such as 64; with compression leave it None."""

    join: Literal["gated", "shared"] = "gated"
    """How a softmax window merges with the far context. `gated`: g near + (1-g) far. `shared`: one normalizer, in
    which a learned weight per head scales the far context."""

    gate: Literal["token", "head"] = "token"
    """Gate g of join `gated`: one value per `token` and head (a linear map of q), or one per `head`."""

    gate_bias: float = 3.0
    """Initial gate logit. 3.0 gives the window 0.95 of the output, which trained better than 0.0 (docs/results.md)."""

    def problems(self) -> Iterator[Problem]:
        """Keys of a gate where there is none."""
        if self.kind == "kernel":
            yield from self.without_effect("kind", dict.fromkeys(("join", "gate", "gate_bias"), ("softmax",)))
        else:
            yield from self.without_effect("join", dict.fromkeys(("gate", "gate_bias"), ("gated",)))


class Selection(Section):
    """Earlier blocks that a query chooses by their landmarks and reads exactly, under one softmax with its window."""

    blocks: int = Field(default=8, gt=0, le=1_000_000)
    """Blocks that a query chooses, k, as long as those of the window."""

    landmarks: int | None = Field(default=None, gt=0, le=1_000_000)
    """Landmarks of a block: means of equal parts of its keys. More of them find rarer tokens and cost more. None: 4;
    with compression, its landmarks."""

    unit: Literal["tile", "token"] = "token"
    """Who chooses: every `token` for itself, or the first token of a block for the whole block (`tile`), which recalls
    far less (docs/selected_blocks.md)."""

    score: Literal["max", "lse"] = "max"
    """A block's score: the largest product of the query with its landmarks (`max`), or their log-sum-exp (`lse`)."""

    levels: Literal[1, 2] = 1
    """2: choose the best groups of 64 blocks first, then blocks in them, so that long sequences do not score every
    block. Up to `blocks` groups this chooses as 1 does."""

    rope: Literal["position", "none"] = "position"
    """Chosen tokens are rotated by their `position`, like those of the window, or are not (`none`)."""


class Algebra(Section):
    """The keys of one attention mechanism."""

    mechanism: Literal[
        "algebra", "skyformer", "nystromformer", "eva", "simple_gla", "bigbird", "informer", "reformer"
    ] = "algebra"
    """`algebra` composes similarity, compression, near and mixture. The others are configured in their own section."""

    skyformer: Skyformer | None = None
    """Settings of mechanism `skyformer`; None: the defaults below."""

    nystromformer: Nystromformer | None = None
    """Settings of mechanism `nystromformer`; None: the defaults below."""

    eva: Eva | None = None
    """Settings of mechanism `eva`; None: the defaults below."""

    simple_gla: SimpleGla | None = None
    """Settings of mechanism `simple_gla`; None: the defaults below."""

    bigbird: Bigbird | None = None
    """Settings of mechanism `bigbird`; None: the defaults below."""

    informer: Informer | None = None
    """Settings of mechanism `informer`; None: the defaults below."""

    reformer: Reformer | None = None
    """Settings of mechanism `reformer`; None: the defaults below."""

    similarity: Literal["softmax", "gaussian", "kernel"] = "softmax"
    """Weight of a (possibly compressed) key k for query q: `softmax` exp(q.k/sqrt(d)), `gaussian`
    exp(-‖q-k‖^2/2sqrt(d)) or `kernel` phi(q).phi(k)."""

    normalize: bool = True
    """Divide by the sum of a query's weights. False requires similarity `gaussian` (kernelized attention)."""

    mixture: Mixture | None = None
    """Several keys per position or landmark; None: one."""

    feature_map: FeatureMap | None = None
    """phi of similarity `kernel`, which requires it."""

    compression: Compression | None = None
    """Compression of keys and values along the sequence into landmarks, by `kind`; None: none."""

    near: Near | None = None
    """Window attended exactly, which causal models need beside compression. Without compression: windowed softmax."""

    selection: Selection | None = None
    """Blocks chosen by landmarks and read exactly, as a part of a softmax window; None: none."""

    window: int | None = Field(default=None, ge=2)
    """Sliding window of plain softmax: tokens that a query sees, itself included; None: its whole document."""

    softcap: float | None = Field(default=None, gt=0)
    """Caps the logits of plain softmax to c tanh(q.k / c), as Gemma 2 does; this is c. None: no cap."""

    short_convolution: int | None = Field(default=None, ge=2, le=1_000)
    """Width in tokens, usually 4, of a causal depthwise convolution of q, k and v, followed by SiLU; None: none."""

    output_norm: bool = False
    """RMSNorm of each head's output, with one weight vector for all heads, as in RetNet and Mamba-2."""

    output_gate: Literal["silu", "sigmoid"] | None = None
    """Multiply each head's output by this function of a projection of the layer's input; None: no gate."""

    far_rope: Literal["none", "centroid"] = "none"
    """Rotary embedding of landmarks: `none`, or `centroid`: compress unrotated keys, rotate to the block's center."""

    far_decay: Literal["none", "fixed", "gate"] = "none"
    """Decay of FLuRKA's far context at the end of each block: a `fixed` factor per head, or a `gate` on its last
    token."""

    @property
    def compresses_input(self) -> bool:
        """Whether keys and values are projected from a compressed input (FLuRKA eq. 2)."""
        compression = self.compression
        if compression is None or self.near is not None or compression.compress == "projected":
            return False
        return not getattr(compression, "per_head", False)

    @property
    def landmarks_of_block(self) -> int:
        """Landmarks by which a `selection` scores a block, r."""
        if isinstance(self.compression, BlockCompression):
            return self.compression.rank
        return (self.selection and self.selection.landmarks) or 4

    @property
    def redraws(self) -> bool:
        """Whether the layer has noise that is redrawn in training and kept fixed in evaluation."""
        redrawn_map = self.feature_map is not None and self.feature_map.redraw_interval > 0
        return redrawn_map or self.mechanism in ("skyformer", "informer", "reformer")

    @property
    def keys_per_head(self) -> int:
        """Keys per key head that the layer's key projection outputs."""
        return self.mixture.keys if self.mixture is not None and self.mixture.kind == "projected" else 1

    @property
    def learns_variances(self) -> bool:
        """Whether the variances of mixture keys are learned."""
        return self.mixture is not None and self.mixture.sigma2 == "learned"

    @property
    def keys_at_position(self) -> int:
        """Keys per position or landmark, M."""
        return 1 if self.mixture is None else self.mixture.keys

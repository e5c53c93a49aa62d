"""The algebra of mechanisms: similarity, compression, near window; or a mechanism outside it (docs/formulas.md, 1)."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from .errors import Problem
from .feature_map import FeatureMap
from .section import Section

Stage = Literal["input", "projected"]


class _Compression(Section):
    compress: Stage | None = None
    """What E and F act on: `input` (FLuRKA eq. 2) or `projected` keys and values (eq. 1); None: input if it can be."""


class BlockCompression(_Compression):
    """Blocks of `block_size` tokens become `rank` landmarks each: k~ = E k_block, v~ = F v_block."""

    kind: Literal["block"] = "block"
    """How the sequence is shortened."""

    block_size: int = Field(default=64, gt=0)
    """Tokens per block, b."""

    rank: int = Field(default=8, gt=0, le=1_000_000)
    """Landmarks per block, r."""

    per_head: bool = False
    """One (E, F) for each key head instead of one shared by all heads of the layer."""

    share_kv: bool = False
    """One E for keys and values."""

    def problems(self) -> Iterator[Problem]:
        """A block has no more landmarks than tokens."""
        if self.rank > self.block_size:
            yield self.problem(
                "rank", f"exceeds block_size={self.block_size}", f"set rank<={self.block_size}"
            )
        yield from _stage_problems(self.compress, self.per_head)


class PoolCompression(_Compression):
    """Blocks of `block_size` tokens become their mean."""

    kind: Literal["pool"]
    """How the sequence is shortened."""

    block_size: int = Field(default=64, gt=0)
    """Tokens per block, b."""


class LinformerCompression(_Compression):
    """All tokens of a sequence become `rank` landmarks: E, F in R^(d_k x N), one column for each place of a sequence.

    N is model.max_positions, else training.seq_len; shorter sequences use the first columns.
    """

    kind: Literal["linformer"]
    """How the sequence is shortened."""

    rank: int = Field(default=256, gt=0, le=1_000_000)
    """Landmarks of a sequence, d_k."""

    per_head: bool = False
    """One (E, F) for each key head instead of one shared by all heads of the layer."""

    share_kv: bool = False
    """One E for keys and values."""

    def problems(self) -> Iterator[Problem]:
        """Heads share what acts on the input."""
        yield from _stage_problems(self.compress, self.per_head)


def _stage_problems(compress: Stage | None, per_head: bool) -> Iterator[Problem]:
    if compress == "input" and per_head:
        reason = "is what the heads of a layer share, and per_head gives each its own E"
        yield Problem("compress", compress, reason, "set compress: projected or remove per_head")


def _kind(value: Any) -> str:
    return value.get("kind", "block") if isinstance(value, dict) else getattr(value, "kind", "block")


Compression = Annotated[
    Annotated[BlockCompression, Tag("block")]
    | Annotated[PoolCompression, Tag("pool")]
    | Annotated[LinformerCompression, Tag("linformer")],
    Discriminator(_kind),
]
"""One of the three by `kind`; without it, `block`."""


class Mixture(Section):
    """M keys stand at every position or landmark, which weighs sum_r pi_r s(q, k_r) under the similarity s of its part.

    That part is the layer, or the near window, whose `near.kind` may differ from the similarity of landmarks.
    """

    keys: int = Field(default=2, ge=2, le=1_000)
    """Keys per position, M."""

    kind: Literal["projected", "shifted"] = "projected"
    """`projected`: each key has a projection of its own. `shifted`: one projection, and a learned shift per key."""

    estep: Literal["soft", "hard"] = "soft"
    """`soft`: the position weighs the mean over its keys under priors pi. `hard`: its nearest key, without pi."""

    m_step: bool = False
    """Set pi to the mean responsibility of each key after every step, instead of learning it by gradients."""

    sigma2: list[Annotated[float, Field(gt=0)]] | None = None
    """Variance of each key in units of sqrt(head_dim), for similarity `gaussian`; None takes 1 for all."""

    def problems(self) -> Iterator[Problem]:
        """Priors and variances that nothing would use."""
        if self.m_step and self.estep == "hard":
            yield self.problem("m_step", "has no effect on estep: hard, which has no priors", "remove one")
        if self.sigma2 is not None and len(self.sigma2) != self.keys:
            reason = f"has {len(self.sigma2)} values for keys={self.keys}"
            yield self.problem("sigma2", reason, "write one value per key")


class Skyformer(Section):
    """Nyström's approximation of kernelized attention from rows of [Q; K] drawn at random."""

    features: int = Field(default=128, gt=0, le=1_000_000)
    """Landmarks drawn with replacement from the 2N queries and keys."""

    draw: Literal["uniform", "stratified"] = "uniform"
    """`uniform` over queries and keys together; `stratified`: one half from each."""

    per_head: bool = True
    """Landmarks of its own for each head, instead of one draw shared by all heads of the layer."""

    inverse: Literal["iterative", "exact"] = "iterative"
    """`iterative`: matrix products only, six steps on the matrix regularized by gamma. `exact`: pseudo-inverse."""

    gamma: float = Field(default=0.1, gt=0)
    """Added to the diagonal before the iterative inverse."""


class Nystromformer(Section):
    """Nyström's approximation of softmax attention from means over segments of queries and keys."""

    landmarks: int = Field(default=64, gt=0, le=1_000_000)
    """Segments of a sequence, each one landmark query and one landmark key."""

    conv_kernel: int | None = Field(default=None, gt=0, le=1_000_000)
    """Tokens under a depthwise convolution of the values, added to the output; odd. None: no convolution."""

    def problems(self) -> Iterator[Problem]:
        """A filter reaches as far to the left as to the right."""
        if self.conv_kernel is not None and self.conv_kernel % 2 == 0:
            reason, remedy = "has no middle token", f"set {self.conv_kernel - 1} or {self.conv_kernel + 1}"
            yield self.problem("conv_kernel", reason, remedy)


class Eva(Section):
    """Softmax over the keys of a token's window and one summary (k_c, beta_c) for each chunk of keys."""

    window_size: int = Field(default=64, gt=0)
    """Tokens of a window, w, attended exactly."""

    chunk_size: int = Field(default=16, gt=0)
    """Tokens of a chunk; with compression, chunks are equal shares of the compressed keys, one for each window."""

    overlap: bool = False
    """Windows reach into the neighbouring one, before and (where not causal) after them, for keys."""

    exclude_window: bool = False
    """Leave chunks inside a token's own window out of what it sees; the published form counts them twice."""

    published_padding: bool = False
    """Means of chunks count padding as zeros, as in the published code; outputs then depend on the padding."""


class SimpleGla(Section):
    """S_i = a_i S_(i-1) + k_i v_i^T and o_i = q_i^T S_i / sqrt(d), with one factor a_i in (0, 1] for each key head."""

    update: Literal["sum", "delta"] = "sum"
    """`sum`: a token adds k_i v_i^T. `delta`: it moves what the state has under k_i towards v_i, by a share that a
    projection of the layer's input names; q_i and k_i have length 1 (gated DeltaNet)."""

    decay: Literal["gate", "step", "fixed", "none"] = "gate"
    """a_i of a token: `gate` sigmoid(w.x_i + b); `step` exp(-A t_i) with t_i = softplus(w.x_i + b), which under update
    `sum` also scales v_i (Mamba-2). `fixed`: 1 - 2^(-5-h) of key head h, whatever the token (RetNet). `none`: 1."""

    gate_logit_normalizer: float = Field(default=16.0, gt=0)
    """log a_i = log sigmoid(w.x_i + b) divided by this, for decay `gate`: larger numbers forget more slowly."""

    def problems(self) -> Iterator[Problem]:
        """A normalizer that no gate would use."""
        yield from self.without_effect("decay", {"gate_logit_normalizer": ("gate",)})


class Near(Section):
    """What a token attends exactly: its current block, optionally the block before, of its own document."""

    kind: Literal["softmax", "kernel"] = "softmax"
    """Similarity inside the window: exp(q.k/sqrt(d)), or the layer's own phi(q).phi(k) (pure FLuRKA)."""

    blocks: Literal[1, 2] = 1
    """1: current block. 2: current block and the previous one."""

    block_size: int | None = Field(default=None, gt=0)
    """Window block; None takes compression.block_size. Only a layer without compression sets it."""

    join: Literal["gated", "shared"] = "gated"
    """Softmax window with far part: `gated` g near + (1-g) far; `shared` one normalizer, a far weight."""

    gate: Literal["token", "head"] = "token"
    """Gate of join `gated`: one value per token and head (a linear map of q), or one per head."""

    gate_bias: float = 3.0
    """Initial gate logit. 3.0 starts near-dominant, at 0.95: measured better than 0.0 (docs/results.md)."""


class Algebra(Section):
    """One point of the algebra, or a mechanism outside it."""

    mechanism: Literal["algebra", "skyformer", "nystromformer", "eva", "simple_gla"] = "algebra"
    """`algebra`: what the other keys compose. The others approximate one matrix as a whole and take their section."""

    skyformer: Skyformer | None = None
    """Settings of mechanism `skyformer`; None takes its defaults."""

    nystromformer: Nystromformer | None = None
    """Settings of mechanism `nystromformer`; None takes its defaults."""

    eva: Eva | None = None
    """Settings of mechanism `eva`; None takes its defaults."""

    simple_gla: SimpleGla | None = None
    """Settings of mechanism `simple_gla`; None takes its defaults."""

    similarity: Literal["softmax", "gaussian", "kernel"] = "softmax"
    """How alike q and a (possibly compressed) k are: exp(q.k/sqrt(d)), exp(-|q-k|^2/2sqrt(d)) or phi(q).phi(k)."""

    normalize: bool = True
    """Divide by the sum of a query's weights; false only under similarity `gaussian` (kernelized attention)."""

    mixture: Mixture | None = None
    """Several keys at one position or landmark; None: one."""

    feature_map: FeatureMap | None = None
    """phi, for similarity `kernel`."""

    compression: Compression | None = None
    """How keys and values are shortened along the sequence before the far similarity."""

    near: Near | None = None
    """The exact window of a causal compressed mechanism; alone (no compression), windowed softmax."""

    window: int | None = Field(default=None, ge=2)
    """Last tokens that a query of plain softmax sees, its own included; None: all of its document's."""

    softcap: float | None = Field(default=None, gt=0)
    """c of c tanh(q.k / c) in the exponents of plain softmax, as Gemma 2 has it; None: they are not capped."""

    short_convolution: int | None = Field(default=None, ge=2, le=1_000)
    """Last tokens, usually 4, under a learned filter of every channel of q, k and v, followed by SiLU; None: none."""

    output_norm: bool = False
    """RMSNorm of each head's output, with one weight for all heads, in place of the sum of weights or beside it."""

    output_gate: Literal["silu", "sigmoid"] | None = None
    """Each head's output is multiplied by this of a projection of the layer's input; None: it is not."""

    far_rope: Literal["none", "centroid"] = "none"
    """Rotation of landmarks: none, or pool unrotated keys and rotate the landmark at its block's centre."""

    far_decay: Literal["none", "fixed", "gate"] = "none"
    """Decay of FLuRKA's landmarks where a block ends: a factor fixed for each head, or named by its last token."""

    @property
    def compresses_input(self) -> bool:
        """Whether keys and values are projections of a compressed input (FLuRKA eq. 2)."""
        compression = self.compression
        if compression is None or self.near is not None or compression.compress == "projected":
            return False
        return not getattr(compression, "per_head", False)

    @property
    def redraws(self) -> bool:
        """Whether the layer has noise that training redraws and evaluation holds."""
        learned = self.feature_map is not None and self.feature_map.redraw_interval > 0
        return learned or self.mechanism == "skyformer"

    @property
    def keys_per_head(self) -> int:
        """Keys that the layer's projection makes for one key head."""
        return self.mixture.keys if self.mixture is not None and self.mixture.kind == "projected" else 1

    @property
    def keys_at_position(self) -> int:
        """Keys that a query meets at one position or landmark, M."""
        return 1 if self.mixture is None else self.mixture.keys

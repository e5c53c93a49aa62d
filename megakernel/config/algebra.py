"""What a mechanism is asked: similarity, compression and near window, or a mechanism beside (docs/formulas.md, 1)."""

from typing import Literal

from pydantic import Field

from .compression import Compression
from .eva import Eva
from .feature_map import FeatureMap
from .landmark import Nystromformer, Skyformer
from .mixture import Mixture
from .section import Section
from .simple_gla import SimpleGla


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
    """One point of the algebra, or a mechanism beside it."""

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

    far_rope: Literal["none", "centroid"] = "none"
    """Rotation of landmarks: none, or pool unrotated keys and rotate the landmark at its block's centre."""

    @property
    def is_uncompressed(self) -> bool:
        """Whether a query meets every key of its row as it is."""
        return self.near is None and self.compression is None

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

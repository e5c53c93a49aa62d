"""The attention tree: similarity x compression x near window, and the presets that name points of it.

A mechanism answers independent questions (MECHANISMS section 1); a preset is a name for one set of answers.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .errors import ConfigError, Problem, nearest_first
from .merging import merged
from .section import Section

FeatureMapName = Literal["elu", "favor", "hedgehog", "relu", "identity"]


class FeatureMap(Section):
    """The map phi of similarity `kernel`: how alike q and k are is phi(q).phi(k)."""

    name: FeatureMapName = "hedgehog"
    """Which phi (MECHANISMS section 2)."""

    samples: int | None = Field(default=None, gt=0)
    """Random samples M of `favor`; None takes 2 x head_dim rounded up to a multiple of head_dim."""

    def problems(self) -> Iterator[Problem]:
        """Only a random map draws samples."""
        if self.samples is not None and self.name != "favor":
            yield Problem(
                "samples", self.samples, f"has no effect on {self.name}", "remove it or take name: favor"
            )


class BlockCompression(Section):
    """Blocks of `block_size` tokens become `rank` landmarks each: k~ = E k_block, v~ = F v_block."""

    kind: Literal["block"] = "block"
    """How the sequence is shortened."""

    block_size: int = Field(default=64, gt=0)
    """Tokens per block, b."""

    rank: int = Field(default=8, gt=0)
    """Landmarks per block, r."""

    per_head: bool = False
    """One (E, F) for each key head instead of one shared by all heads of the layer."""

    def problems(self) -> Iterator[Problem]:
        """A block has no more landmarks than tokens."""
        if self.rank > self.block_size:
            yield Problem(
                "rank", self.rank, f"exceeds block_size={self.block_size}", f"set rank<={self.block_size}"
            )


class Near(Section):
    """What a token attends exactly: its own block, optionally the block before, of its own document."""

    kind: Literal["softmax", "kernel"] = "softmax"
    """Similarity inside the window: exp(q.k/sqrt(d)), or the layer's own phi(q).phi(k) (pure FLuRKA)."""

    blocks: Literal[1, 2] = 1
    """1: own block. 2: own block and the previous one."""

    block_size: int | None = Field(default=None, gt=0)
    """Window block; None takes compression.block_size. Only a layer without compression sets it."""

    join: Literal["gated", "shared"] = "gated"
    """Softmax window with far part: `gated` g near + (1-g) far; `shared` one normalizer, a far weight."""

    gate: Literal["token", "head"] = "token"
    """Gate of join `gated`: one value per token and head (a linear map of q), or one per head."""

    gate_bias: float = 3.0
    """Initial gate logit. 3.0 starts near-dominant, at 0.95: measured better than 0.0 (docs/results.md)."""


class Attention(Section):
    """One attention mechanism as a point of the algebra."""

    similarity: Literal["softmax", "kernel"] = "softmax"
    """How alike a query and a (possibly compressed) key are."""

    feature_map: FeatureMap | None = None
    """phi, for similarity `kernel`."""

    compression: BlockCompression | None = None
    """How keys and values are shortened along the sequence before the far similarity."""

    near: Near | None = None
    """The exact window of a causal compressed mechanism; alone (no compression), windowed softmax."""

    far_rope: Literal["none", "centroid"] = "none"
    """Rotation of landmarks: none, or pool unrotated keys and rotate the landmark at its block's centre."""

    @property
    def block_size(self) -> int | None:
        """Tokens of one block of the compression or the window; None where the layer knows no blocks."""
        if self.compression is not None:
            return self.compression.block_size
        return self.near.block_size if self.near is not None else None

    @property
    def is_full_softmax(self) -> bool:
        """Whether every token attends every earlier one by softmax, at quadratic cost."""
        return self.similarity == "softmax" and self.near is None

    def problems(self) -> Iterator[Problem]:
        """Which answers of the algebra go together."""
        if self.similarity == "kernel" and self.feature_map is None:
            yield Problem(
                "feature_map",
                None,
                "is missing beside similarity: kernel",
                "add feature_map: {name: hedgehog}",
            )
        if self.similarity == "softmax" and self.feature_map is not None:
            remedy = "remove it or take similarity: kernel"
            yield Problem(
                "feature_map", self.feature_map.name, "has no effect on similarity: softmax", remedy
            )
        if self.similarity == "softmax" and self.compression is not None:
            remedy = "take similarity: kernel with it"
            yield Problem("compression", self.compression.kind, "is not available under softmax", remedy)
        if self.compression is not None and self.near is None:
            reason = "is missing beside compression: a causal token must see its own block"
            yield Problem("near", None, reason, "add near: {kind: softmax}")
        if self.far_rope == "centroid" and self.compression is None:
            yield Problem(
                "far_rope",
                self.far_rope,
                "rotates landmarks and there are none",
                "remove it or add compression",
            )
        if self.near is not None:
            yield from self._near_problems(self.near)

    def _near_problems(self, near: Near) -> Iterator[Problem]:
        if self.compression is not None and near.block_size is not None:
            reason = "is set twice: the window's block is compression.block_size"
            yield Problem("near.block_size", near.block_size, reason, "remove it")
        if self.compression is None and self.similarity == "kernel":
            yield Problem(
                "near",
                near.kind,
                "beside similarity: kernel needs compression",
                "add compression or remove it",
            )
        if self.compression is None and self.similarity == "softmax":
            if near.kind != "softmax":
                yield Problem("near.kind", near.kind, "needs similarity: kernel", "take kind: softmax")
            if near.block_size is None:
                yield Problem(
                    "near.block_size",
                    None,
                    "is missing: a window alone needs its length",
                    "set it, such as 64",
                )


PRESETS: dict[str, dict[str, Any]] = {
    "softmax": {"similarity": "softmax"},
    "linear": {"similarity": "kernel", "feature_map": {"name": "elu"}},
    "performer": {"similarity": "kernel", "feature_map": {"name": "favor"}},
    "hedgehog": {"similarity": "kernel", "feature_map": {"name": "hedgehog"}},
    "flurka": {
        "similarity": "kernel",
        "feature_map": {"name": "hedgehog"},
        "compression": {"kind": "block", "block_size": 64, "rank": 8},
        "near": {"kind": "softmax", "join": "gated", "gate": "token"},
    },
    "flurka_kernel": {
        "similarity": "kernel",
        "feature_map": {"name": "hedgehog"},
        "compression": {"kind": "block", "block_size": 64, "rank": 8},
        "near": {"kind": "kernel"},
    },
    "local": {"similarity": "softmax", "near": {"kind": "softmax", "block_size": 64}},
}
"""Preset name -> attention tree. `flurka` is the hybrid of MECHANISMS section 4, `local` its ablation."""


DEFAULT_PRESET = "flurka"
"""The attention of a model that names none."""


def expand_preset(value: Any) -> Any:
    """Replace a preset's name, or a tree with `preset: NAME` and changes, by the whole tree."""
    changes: dict[str, Any] = {}
    if isinstance(value, dict) and "preset" in value:
        changes = {key: item for key, item in value.items() if key != "preset"}
        value = value["preset"]
    if not isinstance(value, str):
        return value
    if value not in PRESETS:
        raise ConfigError(
            [Problem("", value, "is no attention preset", f"choose {nearest_first(value, PRESETS)}")]
        )
    return merged(PRESETS[value], changes)


AttentionField = Annotated[Attention, BeforeValidator(expand_preset)]
"""A preset name, `{preset: NAME, ...changes}` or a whole tree; always an `Attention` once validated."""

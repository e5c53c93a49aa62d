"""The attention tree: similarity x compression x near window, and the presets that name points of it.

A mechanism answers independent questions (MECHANISMS section 1); a preset is a name for one set of answers.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from .section import Section

FeatureMapName = Literal["elu", "favor", "hedgehog", "relu", "identity"]


class FeatureMap(Section):
    """The map phi of similarity `kernel`: how alike q and k are is phi(q).phi(k)."""

    name: FeatureMapName = "hedgehog"
    """Which phi (MECHANISMS section 2)."""

    samples: int | None = Field(default=None, gt=0)
    """Random samples M of `favor`; None takes 2 x head_dim rounded up to a multiple of head_dim."""

    @model_validator(mode="after")
    def _samples_belong_to_random_maps(self) -> "FeatureMap":
        if self.samples is not None and self.name != "favor":
            raise ValueError(f"feature map {self.name!r} draws no samples; remove `samples` or use name: favor")
        return self


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

    @model_validator(mode="after")
    def _rank_fits_block(self) -> "BlockCompression":
        if self.rank > self.block_size:
            raise ValueError(f"rank={self.rank} exceeds block_size={self.block_size}; choose rank <= block_size")
        return self


class Near(Section):
    """What a token attends exactly: its own block, optionally the block before, of its own document."""

    kind: Literal["softmax", "kernel"] = "softmax"
    """Similarity inside the window: exp(q.k/sqrt(d)), or the layer's own phi(q).phi(k) (pure FLuRKA)."""

    blocks: Literal[1, 2] = 1
    """1: own block. 2: own block and the previous one."""

    block_size: int | None = Field(default=None, gt=0)
    """Window block; None takes compression.block_size. Only a layer without compression sets it."""

    join: Literal["gated", "shared"] = "gated"
    """Softmax window and far part: `gated` g near + (1-g) far, or `shared` one normalizer with a learned far weight."""

    gate: Literal["token", "head"] = "token"
    """Gate of join `gated`: one value per token and head (a linear map of q), or one per head."""

    gate_bias: float = 0.0
    """Initial gate logit; 3.0 starts near-dominant."""


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

    @model_validator(mode="after")
    def _is_a_mechanism(self) -> "Attention":
        if (self.similarity == "kernel") != (self.feature_map is not None):
            raise ValueError("similarity: kernel needs feature_map, and only it takes one")
        if self.similarity == "softmax" and self.compression is not None:
            raise ValueError("softmax over landmarks is not available yet; use similarity: kernel with compression: block")
        if self.compression is not None and self.near is None:
            raise ValueError("compression: block needs near (a causal token must see its own block); add near: {}")
        if self.near is not None:
            self._check_near(self.near)
        return self

    def _check_near(self, near: Near) -> None:
        if self.compression is not None and near.block_size is not None:
            raise ValueError("near.block_size is compression.block_size; remove near.block_size")
        if self.compression is None and self.similarity == "kernel":
            raise ValueError("near beside similarity: kernel needs compression: block; add it or remove near")
        if self.compression is None and (near.block_size is None or near.kind != "softmax"):
            raise ValueError("near without compression is a softmax window: set near.block_size and kind: softmax")


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
"""Preset name -> attention tree. `flurka` is the default hybrid of MECHANISMS section 4; `local` its ablation."""


def expand_preset(value: Any) -> Any:
    """Replace a preset's name, or a tree with `preset: NAME` and changes, by the whole tree."""
    changes: dict[str, Any] = {}
    if isinstance(value, dict) and "preset" in value:
        changes = {key: item for key, item in value.items() if key != "preset"}
        value = value["preset"]
    if not isinstance(value, str):
        return value
    if value not in PRESETS:
        raise ValueError(f"unknown attention preset {value!r}; known: {', '.join(PRESETS)}")
    return _merged(PRESETS[value], changes)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, item in changes.items():
        nested = isinstance(item, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], item) if nested else item
    return out


AttentionField = Annotated[Attention, BeforeValidator(expand_preset)]
"""A preset name, `{preset: NAME, ...changes}` or a whole tree; always an `Attention` once validated."""

"""One attention mechanism, its checks, and the presets (docs/formulas.md, 1)."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from .algebra import Algebra, Compression, Mixture, Near, Selection
from .errors import ConfigError, Problem, nearest_first
from .feature_map import LEARNED
from .mechanisms import LayerShape, Mechanism, Parts, mechanism_of
from .section import merged

OPTIONAL_PARTS = ("short_convolution", "output_norm", "output_gate")
"""Keys of optional parts of a layer that surround its mechanism."""


class Attention(Algebra):
    """One attention mechanism: a preset name, `{preset: NAME, ...changes}`, or these keys (docs/formulas.md, 1).

    A mapping with `preset`, `mechanism` or `similarity` replaces that of an extended file; other keys change it. On
    the command line, `model.attention.similarity=softmax` changes one key, while
    `model.attention={similarity: softmax}` and `model.attention.preset=softmax` replace all.
    """

    @property
    def spec(self) -> Mechanism:
        """Capabilities and costs of the mechanism."""
        return mechanism_of(self)

    @property
    def block_size(self) -> int | None:
        """Tokens per block of the compression or the window; None if the layer has no blocks."""
        return self.spec.block_size

    @property
    def is_plain_softmax(self) -> bool:
        """Whether this is the softmax of dense models, perhaps in a sliding window; optional parts may surround it."""
        return self.weighs_every_pair and self.similarity == "softmax" and self.mixture is None

    @property
    def is_flurka(self) -> bool:
        """Whether this is FLuRKA, the product of a low-rank and a kernel approximation (docs/formulas.md, 3 and 4)."""
        return self.compression is not None and (self.similarity == "kernel" or self.mechanism == "eva")

    @property
    def is_bare_softmax(self) -> bool:
        """Whether this is plain softmax without optional parts, all of whose weights are projections."""
        return self.is_plain_softmax and not self.optional_parts

    @property
    def is_bare_exact(self) -> bool:
        """Whether this is softmax over tokens (all, a window, chosen blocks) with no weights but projections."""
        is_window = self.near is not None and self.compression is None and self.similarity == "softmax"
        return (self.is_plain_softmax or is_window) and not self.optional_parts

    @property
    def weighs_every_pair(self) -> bool:
        """Whether a weight is computed for every pair of tokens, or with `window` for those within it."""
        return self.spec.weighs_every_pair

    @property
    def has_position_parameters(self) -> bool:
        """Whether the layer has parameters per position of a sequence."""
        return self.compression is not None and self.compression.kind == "linformer"

    @property
    def outside_graphs(self) -> str | None:
        """Why torch.compile leaves the mechanism out of its layer's graph; None: it takes it in."""
        map_ = self.feature_map
        # Quotients of sums relative to a largest term: of exponentials without a bound, or that decay.
        if (
            map_ is not None
            and self.normalize
            and (map_.is_unbounded or (self.far_decay != "none" and map_.is_exponential))
        ):
            return "it looks in every layer for queries whose weights have underflowed"
        if self.selection is not None:
            return "torch cannot trace the gradient of chosen blocks"
        weighs_pairs = self.similarity == "gaussian" or (self.mixture and self.similarity == "softmax")
        if weighs_pairs or self.mechanism not in ("algebra", "simple_gla"):
            return "torch cannot trace its gradient or its sizes"
        return None

    @property
    def mixes_future_tokens(self) -> str | None:
        """Why tokens see later ones of their sequence, of any document; None if they need not."""
        return self.spec.mixes_future_tokens

    @property
    def mixes_documents(self) -> str | None:
        """Why bidirectional tokens also see other documents of their sequence; None if documents stay separate."""
        return self.spec.mixes_documents or self.mixes_future_tokens

    @property
    def looks_back_only(self) -> str | None:
        """Why the layer is causal only; None if it can be bidirectional."""
        if self.short_convolution is not None:
            return "a short convolution looks back only"
        return self.spec.looks_back_only

    @property
    def optional_parts(self) -> dict[str, Any]:
        """The `OPTIONAL_PARTS` keys that the layer uses, with their values."""
        return {part: getattr(self, part) for part in OPTIONAL_PARTS if self.is_set(part)}

    def flops(self, shape: LayerShape) -> Parts:
        """Forward FLOPs per token of a layer, by part, without its query, key, value and output projections."""
        further = self.spec.further * shape.kv_heads
        if self.output_gate is not None:
            further += shape.heads * shape.head_dim
        parts = {
            "projections": 2 * shape.hidden_size * further,
            "convolution": 2 * (self.short_convolution or 0) * self._channels(shape),
        }
        return self.spec.flops(shape) | {name: part for name, part in parts.items() if part}

    def state_sizes(self, shape: LayerShape) -> tuple[int, int]:
        """`Mechanism.state_sizes`, plus the past tokens that the short convolution needs."""
        constant, added = self.spec.state_sizes(shape)
        return constant + ((self.short_convolution or 1) - 1) * self._channels(shape), added

    def _channels(self, shape: LayerShape) -> int:
        """Channels of queries, keys and values together."""
        return (shape.heads + (self.keys_per_head + 1) * shape.kv_heads) * shape.head_dim

    def optional_parameters(self, shape: LayerShape) -> tuple[int, int]:
        """Parameters of the short convolution, which are per head, and of the output norm, which heads share."""
        return (self.short_convolution or 0) * self._channels(shape), shape.head_dim * self.output_norm

    def uses_ulysses(self, causal: bool) -> bool:
        """Whether context parallelism uses Ulysses all-to-alls, which need heads divisible by the ranks.

        If `supports_ring_attention` is true too, ring attention is an alternative.
        """
        return any(what.startswith("heads") for what in self.spec.exchanged(causal))

    @property
    def supports_ring_attention(self) -> bool:
        """Whether context parallelism can use ring attention, which works with any number of heads."""
        return "heads or ring" in self.spec.exchanges

    def reads_neighbor(self, tokens: int) -> bool:
        """Whether context shards of so many tokens need those of a sliding window alone, all in the shard before."""
        return self.window is not None and self.window - 1 <= tokens

    def problems(self) -> Iterator[Problem]:
        """Keys that cannot be combined."""
        if self.similarity == "kernel" and self.feature_map is None:
            yield self.problem(
                "feature_map", "is missing beside similarity: kernel", "add feature_map: {name: hedgehog}"
            )
        yield from self.without_effect("similarity", {"feature_map": ("kernel",)})
        if self.similarity == "gaussian" and self.compression is not None:
            remedy = "take similarity: softmax or kernel with it"
            yield Problem("compression", self.compression.kind, "is not available under gaussian", remedy)
        if self.far_rope == "centroid" and self.compression is None:
            yield self.problem(
                "far_rope", "rotates landmarks and there are none", "remove it or add compression"
            )
        if self.far_decay != "none" and None in (self.compression, self.near, self.feature_map):
            reason = "decays landmarks that a kernel weighs beside a near window, and there are none"
            yield self.problem("far_decay", reason, "remove it or take preset: flurka")
        if not self.is_plain_softmax:
            if self.window is not None:
                remedy = "remove it; near and compression have windows of blocks"
                yield self.problem("window", "is only for plain softmax", remedy)
            if self.softcap is not None:
                reason = "is only for plain softmax: other mechanisms have no exponents q.k to cap"
                yield self.problem("softcap", reason, "remove it")
        if self.short_convolution is not None and self.mixes_future_tokens:
            reason = f"looks back only, and {self.mixes_future_tokens}"
            yield self.problem("short_convolution", reason, "remove it")
        if self.near is not None:
            yield from self._near_problems(self.near)
        if self.selection is not None:
            yield from self._selection_problems(self.selection)
        if self.compression is not None:
            yield from self._compression_problems(self.compression)
        if not self.normalize and self.similarity != "gaussian":
            reason = f"leaves weights without bound under similarity: {self.similarity}"
            yield self.problem("normalize", reason, "take similarity: gaussian or remove it")
        if self.mixture is not None:
            yield from self._mixture_problems(self.mixture)
        if self.mechanism != "algebra":
            yield from self._mechanism_problems()
        sections = ("skyformer", "nystromformer", "eva", "simple_gla", "bigbird", "informer", "reformer")
        yield from self.without_effect("mechanism", {name: (name,) for name in sections})

    def _compression_problems(self, compression: Compression) -> Iterator[Problem]:
        if self.far_rope == "centroid" and compression.kind == "linformer":
            reason = "rotates a landmark at the center of its block, and linformer has no blocks"
            yield self.problem("far_rope", reason, "set far_rope: none or take kind: block")
        if self.mechanism == "eva" and compression.kind != "linformer":
            reason = "leaves no equal share of keys for every window of eva"
            yield self.problem("compression.kind", reason, "take kind: linformer")
        if self.near is None:
            return
        if compression.kind != "block":
            reason = "has no complete blocks before a token's near window"
            yield self.problem("compression.kind", reason, "take kind: block or remove near")
        if compression.compress == "input":
            reason = "saves nothing beside near, which needs every key"
            yield self.problem("compression.compress", reason, "remove it or remove near")

    def _mixture_problems(self, mixture: Mixture) -> Iterator[Problem]:
        if mixture.sigma2 is not None and self.similarity != "gaussian":
            reason = f"has no effect on similarity: {self.similarity}"
            yield self.problem("mixture.sigma2", reason, "remove it or take similarity: gaussian")
        counts_pairs = mixture.estep == "hard" or mixture.m_step
        if counts_pairs and self.mechanism == "algebra" and not self.weighs_every_pair:
            key = "mixture.m_step" if mixture.m_step else "mixture.estep"
            shortcut = "near" if self.compression is None else "compression"
            if self.similarity == "kernel":
                shortcut = "similarity: kernel"
            reason = f"needs the weight of every pair, which {shortcut} never forms"
            is_whole = self.near is None and self.compression is None
            instead = "similarity: gaussian" if is_whole else "preset: mgk"
            yield self.problem(key, reason, f"remove it or take {instead}")

    def _selection_problems(self, selection: Selection) -> Iterator[Problem]:
        near, compression = self.near, self.compression
        if near is None or near.kind != "softmax" or self.similarity == "gaussian":
            reason = "chooses blocks for a softmax window, and there is none"
            yield Problem("selection", selection.blocks, reason, "take preset: selected or flurka_selected")
        elif self.mixture is not None:
            yield Problem("selection", selection.blocks, "is not available with mixture", "remove mixture")
        elif compression is not None and (self.similarity != "kernel" or near.join != "gated"):
            reason = "beside compression needs FLuRKA's gate between the window and the far context"
            yield Problem("selection", selection.blocks, reason, "take preset: flurka_selected")
        elif compression is not None and selection.landmarks is not None:
            reason = "is given twice: a block has the landmarks of compression"
            yield self.problem("selection.landmarks", reason, "remove it")
        elif near.block_size is not None and near.block_size % self.landmarks_of_block:
            reason = f"{self.landmarks_of_block} does not divide near.block_size={near.block_size} into equal parts"
            remedy = f"take a divisor of {near.block_size}"
            yield Problem("selection.landmarks", selection.landmarks, reason, remedy)

    def _mechanism_problems(self) -> Iterator[Problem]:
        for name in ("similarity", "normalize", "mixture", "feature_map", "compression", "near", "selection"):
            if self.is_set(name) and (name, self.mechanism) != ("compression", "eva"):
                reason = f"is a part of the algebra, and mechanism is {self.mechanism}"
                yield self.problem(name, reason, "remove it or remove mechanism")

    def _near_problems(self, near: Near) -> Iterator[Problem]:
        if self.similarity == "gaussian":
            remedy = "take similarity: softmax or kernel with it"
            yield Problem("near", near.kind, "is not available under gaussian", remedy)
        if self.compression is not None and near.block_size is not None:
            reason = "is set twice: the window's block is compression.block_size"
            yield self.problem("near.block_size", reason, "remove it")
        for key in ("join", "gate", "gate_bias"):
            if self.compression is None and near.is_set(key):
                yield near.problem(
                    key, "joins a window with landmarks, and there are none", "remove it"
                ).under("near")
        if self.compression is None and self.similarity == "kernel":
            reason = "beside similarity: kernel needs compression"
            yield Problem("near", near.kind, reason, "add compression or remove it")
        if self.similarity == "softmax":
            if near.kind != "softmax":
                yield self.problem("near.kind", "needs similarity: kernel", "take kind: softmax")
            if self.compression is None and near.block_size is None:
                yield self.problem(
                    "near.block_size", "is missing: a window alone needs its length", "set it, such as 64"
                )


def _kernel_preset(feature_map: str, **more: Any) -> dict[str, Any]:
    return {"similarity": "kernel", "feature_map": {"name": feature_map}, **more}


_BLOCKS = {"kind": "block", "block_size": 64, "rank": 8}
_LINFORMER = {"kind": "linformer", "rank": 256}
_FLURKA = _kernel_preset(
    "hedgehog", compression=_BLOCKS, near={"kind": "softmax", "join": "gated", "gate": "token"}
)

_NORM_AND_GATE = {"output_norm": True, "output_gate": "silu"}
_CONVOLUTION = {"short_convolution": 4, **_NORM_AND_GATE}

PRESETS: dict[str, dict[str, Any]] = {
    "softmax": {"similarity": "softmax"},
    "linear": _kernel_preset("elu"),
    "performer": _kernel_preset("favor"),
    **{name: _kernel_preset(name) for name in ("hedgehog", "rff", *LEARNED)},
    "flurka": _FLURKA,
    "flurka_decay": {**_FLURKA, "far_decay": "gate"},
    "flurka_kernel": {**_FLURKA, "near": {"kind": "kernel"}},
    "local": {"similarity": "softmax", "near": {"kind": "softmax", "block_size": 64}},
    "selected": {
        "similarity": "softmax",
        "near": {"kind": "softmax", "block_size": 64},
        "selection": {"blocks": 8},
    },
    "flurka_selected": {**_FLURKA, "selection": {"blocks": 8}},
    "gaussian": {"similarity": "gaussian"},
    "kernelized": {"similarity": "gaussian", "normalize": False},
    "mgk": {"similarity": "gaussian", "mixture": {"keys": 2, "kind": "projected"}},
    "smgk": {"similarity": "gaussian", "mixture": {"keys": 2, "kind": "shifted"}},
    "mlk": _kernel_preset("elu", mixture={"kind": "projected"}),
    "smlk": _kernel_preset("elu", mixture={"kind": "shifted"}),
    "linformer": {"similarity": "softmax", "compression": _LINFORMER},
    "linformer_causal": {
        "similarity": "softmax",
        "compression": _BLOCKS,
        "near": {"kind": "softmax", "join": "shared"},
    },
    "flurka_performer": _kernel_preset("favor", compression=_LINFORMER),
    "flurka_rnn": _kernel_preset("elu", compression=_LINFORMER),
    "flurka_eva": {"mechanism": "eva", "compression": _LINFORMER},
    "eva": {"mechanism": "eva"},
    "skyformer": {"mechanism": "skyformer"},
    "nystromformer": {"mechanism": "nystromformer"},
    "bigbird": {"mechanism": "bigbird"},
    "informer": {"mechanism": "informer"},
    "reformer": {"mechanism": "reformer"},
    "retnet": {"mechanism": "simple_gla", "simple_gla": {"decay": "fixed"}, **_NORM_AND_GATE},
    "mamba2": {"mechanism": "simple_gla", "simple_gla": {"decay": "step"}, **_CONVOLUTION},
    "gated_deltanet": {
        "mechanism": "simple_gla",
        "simple_gla": {"update": "delta", "decay": "step"},
        **_CONVOLUTION,
    },
}
"""Preset name -> attention tree. `flurka` is the hybrid of docs/formulas.md, 4; `local` is its window alone."""


DEFAULT_PRESET = "flurka"
"""Attention of a model that does not set `model.attention`."""


def expand_preset(value: Any) -> Any:
    """The whole tree of a preset's name, or of a tree with `preset: NAME` and changes; other values unchanged."""
    changes: dict[str, Any] = {}
    if isinstance(value, dict) and "preset" in value:
        changes = {key: item for key, item in value.items() if key != "preset"}
        value = value["preset"]
    if not isinstance(value, str):
        return value
    if value not in PRESETS:
        raise ConfigError(
            [Problem("", value, "is not an attention preset", f"choose {nearest_first(value, PRESETS)}")]
        )
    return merged(PRESETS[value], changes)


_PresetName = Annotated[str, WithJsonSchema({"enum": [*PRESETS]})]

AttentionField = Annotated[
    Attention, BeforeValidator(expand_preset, json_schema_input_type=_PresetName | Attention)
]
"""A preset name, `{preset: NAME, ...changes}` or a whole tree; an `Attention` after validation."""

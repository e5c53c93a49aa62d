"""The attention configurations on which every property is tested, and inputs for them.

These are all presets, and variants of them. Each configuration itself declares its properties and directions
(`megakernel.config.attention`): neither this file nor a test decides by name.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from megakernel.attention import ALL_HEADS, AttentionInputs, AttentionLayer, HeadShard, build
from megakernel.attention.inputs import DEFAULT_INPUTS
from megakernel.config.attention import PRESETS, Attention, expand_preset
from megakernel.config.section import merged
from megakernel.parallel.partition import Partition
from tests.tiers import tiered

VARIANTS: dict[str, dict[str, Any]] = {
    "simple_gla": {"mechanism": "simple_gla", "simple_gla": {"gate_logit_normalizer": 2.0}},
    "local_two_blocks": {"preset": "local", "near": {"blocks": 2}},
    "selected_token": {"preset": "selected", "selection": {"unit": "token", "blocks": 2}},
    "selected_levels": {
        "preset": "selected",
        "near": {"block_size": 2},
        "selection": {"unit": "token", "blocks": 1, "landmarks": 2, "levels": 2},
    },
    "selected_tile_levels": {
        "preset": "selected",
        "near": {"block_size": 2, "blocks": 2},
        "selection": {"unit": "tile", "blocks": 1, "landmarks": 2, "levels": 2, "score": "lse"},
    },
    "selected_unrotated": {
        "preset": "selected",
        "near": {"blocks": 2},
        "selection": {"blocks": 1, "landmarks": 2, "rope": "none", "score": "lse"},
    },
    "flurka_selected_token": {
        "preset": "flurka_selected",
        "near": {"blocks": 2, "gate": "head"},
        "selection": {"unit": "token", "blocks": 1},
        "far_decay": "gate",
    },
    "smgk_three_keys": {"preset": "smgk", "mixture": {"keys": 3, "sigma2": [1.0, 3.0, 0.5]}},
    "mgk_learned_variances": {"preset": "mgk", "mixture": {"sigma2": "learned"}},
    "smgk_hard": {"preset": "smgk", "mixture": {"estep": "hard"}},
    "mgk_hard": {"preset": "mgk", "mixture": {"estep": "hard"}},
    "mgk_m_step": {"preset": "mgk", "mixture": {"m_step": True}},
    "mgk_softmax": {"preset": "mgk", "similarity": "softmax"},
    "smlk_favor": {"preset": "smlk", "feature_map": {"name": "favor"}},
    "linformer_causal_gated": {
        "preset": "linformer_causal",
        "compression": {"per_head": True},
        "near": {"join": "gated", "blocks": 2},
        "far_rope": "centroid",
    },
    "eva_overlap": {"preset": "eva", "eva": {"overlap": True, "exclude_window": True}},
    "eva_uneven_chunks": {"preset": "eva", "eva": {"chunk_size": 3}},
    # Enough samples that the cosines of these inputs do not cancel even without smoothing.
    "rff_unsmoothed": {"preset": "rff", "feature_map": {"smoothing": 0.0, "samples": 96}},
    "gmm_rks_unsmoothed": {"preset": "gmm_rks", "feature_map": {"smoothing": 0.0}},
    "gmm_rks_untied": {"preset": "gmm_rks", "feature_map": {"components": 3, "tied": False}},
    "fastfood_rks_unsmoothed": {"preset": "fastfood_rks", "feature_map": {"smoothing": 0.0}},
    "fastfood_prf_fixed": {"preset": "fastfood_prf", "feature_map": {"learn": "fixed"}},
    "fastfood_prf_scales": {"preset": "fastfood_prf", "feature_map": {"learn": "S", "smoothing": 0.5}},
    "flurka_two_blocks": {"preset": "flurka", "near": {"blocks": 2}},
    "flurka_fixed_decay": {
        "preset": "flurka",
        "near": {"join": "shared", "blocks": 2},
        "far_decay": "fixed",
    },
    "flurka_favor_decay": {"preset": "flurka_kernel", "feature_map": {"name": "favor"}, "far_decay": "gate"},
    "flurka_head_gate": {"preset": "flurka", "near": {"gate": "head"}, "feature_map": {"name": "elu"}},
    "flurka_centroid": {"preset": "flurka", "far_rope": "centroid"},
    "flurka_per_head": {"preset": "flurka", "compression": {"per_head": True}},
    "flurka_one_pool": {"preset": "flurka", "compression": {"share_kv": True}},
    "flurka_uneven_rank": {"preset": "flurka", "compression": {"block_size": 5, "rank": 3}},
    "flurka_shared": {"preset": "flurka", "near": {"join": "shared"}},
    "flurka_shared_favor": {
        "preset": "flurka",
        "near": {"join": "shared", "blocks": 2},
        "feature_map": {"name": "favor"},
    },
    "flurka_gmm_rks": {"preset": "flurka", "feature_map": {"name": "gmm_rks"}},
    "flurka_shared_fastfood": {
        "preset": "flurka",
        "near": {"join": "shared"},
        "feature_map": {"name": "fastfood_prf", "learn": "fixed"},
    },
    "flurka_generative": {"preset": "flurka", "feature_map": {"name": "generative_prf"}},
    "flurka_kernel_gmm_prf": {
        "preset": "flurka_kernel",
        "feature_map": {"name": "gmm_prf", "components": 3},
    },
    "flurka_kernel_rff": {"preset": "flurka_kernel", "feature_map": {"name": "rff", "smoothing": 0.0}},
    "flurka_kernel_favor": {
        "preset": "flurka_kernel",
        "near": {"blocks": 2},
        "feature_map": {"name": "favor"},
        "far_rope": "centroid",
    },
    "local_mixture": {"preset": "local", "mixture": {}},
    "linformer_causal_mixture": {"preset": "linformer_causal", "mixture": {}},
    "linformer_causal_gated_mixture": {
        "preset": "linformer_causal",
        "compression": {"per_head": True},
        "near": {"join": "gated", "blocks": 2},
        "mixture": {"kind": "shifted", "keys": 3},
        "far_rope": "centroid",
    },
    "flurka_mlk": {"preset": "flurka", "mixture": {}, "far_rope": "centroid"},
    "flurka_smlk": {"preset": "flurka", "mixture": {"kind": "shifted", "keys": 3}},
    "flurka_kernel_mlk": {"preset": "flurka_kernel", "compression": {"per_head": True}, "mixture": {}},
    "flurka_shared_favor_mlk": {
        "preset": "flurka",
        "near": {"join": "shared", "blocks": 2},
        "feature_map": {"name": "favor"},
        "mixture": {},
    },
    "flurka_kernel_favor_smlk": {
        "preset": "flurka_kernel",
        "feature_map": {"name": "favor"},
        "mixture": {"kind": "shifted"},
        "far_rope": "centroid",
    },
    "skyformer_shared_strata": {
        "preset": "skyformer",
        "skyformer": {"features": 13, "draw": "stratified", "per_head": False},
    },
    "flurka_eva_uneven_shares": {"preset": "flurka_eva", "compression": {"rank": 7}},
    "linformer_per_head": {"preset": "linformer", "compression": {"per_head": True}},
    "flurka_rnn_one_pool": {"preset": "flurka_rnn", "compression": {"share_kv": True}},
    "flurka_rnn_gmm_prf": {"preset": "flurka_rnn", "feature_map": {"name": "gmm_prf"}},
    "low_rank_blocks": {
        "similarity": "softmax",
        "compression": {"kind": "block"},
        "far_rope": "centroid",
    },
    "linformer_mixture": {"preset": "linformer", "mixture": {"kind": "shifted", "keys": 3}},
    "low_rank_blocks_mixture": {
        "similarity": "softmax",
        "compression": {"kind": "block", "per_head": True},
        "mixture": {},
        "far_rope": "centroid",
    },
    "flurka_rnn_mixture": {
        "preset": "flurka_rnn",
        "compression": {"per_head": True},
        "mixture": {},
    },
    "flurka_pool": {
        "similarity": "kernel",
        "feature_map": {"name": "hedgehog"},
        "compression": {"kind": "pool"},
    },
    "low_rank_shifted_keys": {
        "similarity": "kernel",
        "feature_map": {"name": "elu"},
        "compression": {"kind": "block", "block_size": 5, "rank": 3, "share_kv": True},
        "mixture": {"kind": "shifted", "keys": 3},
    },
    "bigbird_wide_window": {"preset": "bigbird", "bigbird": {"window_blocks": 5, "random_blocks": 1}},
    "informer_top": {"preset": "informer", "informer": {"factor": 5, "top": 4}},
    "nystromformer_conv": {"preset": "nystromformer", "nystromformer": {"conv_kernel": 3}},
}
"""Name -> tree of a configuration without a preset. Sizes are omitted unless the variant is about them."""

Sizes = dict[str, dict[str, int]]
"""Section or kind of compression -> its sizes."""

SMALL: Sizes = {
    "block": {"block_size": 4, "rank": 2},
    "pool": {"block_size": 4},
    "linformer": {"rank": 5},
    "near": {"block_size": 4},
    "eva": {"window_size": 4, "chunk_size": 2},
    "skyformer": {"features": 12},
    "nystromformer": {"landmarks": 5},
    "bigbird": {"block_size": 2, "random_blocks": 2},
    "informer": {"factor": 1},
    "reformer": {"buckets": 4, "chunk_size": 4},
}
"""Sizes at which a short sequence has many blocks, windows and landmarks."""

HEADS, KV_HEADS, WIDTH = 4, 2, 6
MAX_POSITIONS = 64
"""Number of columns of Linformer's matrices."""


def small(tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` with SMALL sizes, for keys and values of every token."""
    small_tree = sized(tree, SMALL)
    if not Attention.model_validate(small_tree).compresses_input:
        return small_tree
    # Keys and values of compressed inputs have no positions; another test shows that eq. 1 gives the same.
    return merged(small_tree, {"compression": {"compress": "projected"}})


def may_divide_by_zero(config: Attention) -> bool:
    """Whether weights (products of tokens, or cosines without smoothing) have either sign, so that they may cancel."""
    phi = config.feature_map
    return phi is not None and (phi.name == "identity" or (phi.is_trigonometric and phi.smoothing == 0))


def sized(tree: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """`tree` expanded, with `sizes` and a smoothing over its preset and under its own changes."""
    config = Attention.model_validate(expand_preset(tree))
    sizes_of_config: dict[str, Any] = {}
    if config.compression is not None:
        sizes_of_config["compression"] = sizes[config.compression.kind]
    elif config.near is not None:
        sizes_of_config["near"] = sizes["near"]
    if config.mechanism != "algebra":
        sizes_of_config[config.mechanism] = sizes.get(config.mechanism, {})
    if may_divide_by_zero(config):
        # Near a zero denominator every rounding error is large.
        sizes_of_config["feature_map"] = {"smoothing": 1.0}
    changes = {key: part for key, part in tree.items() if key != "preset"}
    return merged(merged(PRESETS.get(tree.get("preset", ""), {}), sizes_of_config), changes)


POINTS: dict[str, dict[str, Any]] = {name: {"preset": name} for name in PRESETS} | VARIANTS
"""Name -> tree of every tested mechanism."""

TREES = {name: small(tree) for name, tree in POINTS.items()}
"""The same trees with small sizes."""

CONFIGS = {name: Attention.model_validate(tree) for name, tree in TREES.items()}

CAUSAL = [name for name, config in CONFIGS.items() if not config.mixes_future_tokens]
"""Mechanisms that can be causal."""

BIDIRECTIONAL = [name for name, config in CONFIGS.items() if not config.looks_back_only]
"""Mechanisms that can be bidirectional."""

DIRECTIONS = [*((name, True) for name in CAUSAL), *((name, False) for name in BIDIRECTIONAL)]
"""Name and causality: every mechanism in every direction that it supports."""

FIRST_VARIANTS = {
    *("simple_gla", "selected_token", "selected_levels", "eva_overlap", "skyformer_shared_strata"),
    *(
        "flurka_fixed_decay",
        "flurka_shared_favor_mlk",
        "linformer_causal_gated",
        "low_rank_blocks",
        "flurka_pool",
    ),
}
"""Variants with code that no preset runs."""

_Case = TypeVar("_Case", str, tuple[str, bool])


def by_tier(cases: Iterable[_Case]) -> list[Any]:
    """Names, or names with causality, for `parametrize`: presets and FIRST_VARIANTS are in the first tier."""
    cases = list(cases)
    names = [case if isinstance(case, str) else case[0] for case in cases]
    return tiered(cases, [c for c, name in zip(cases, names) if name in PRESETS or name in FIRST_VARIANTS])


def layer(
    name: str, *, dtype: torch.dtype = torch.float64, kv_heads: int = KV_HEADS, **options: Any
) -> AttentionLayer:
    """A layer with parameters away from their initial values, at which gates and token counts would have no effect."""
    module = with_projections(
        build(
            TREES[name],
            num_heads=HEADS,
            num_kv_heads=kv_heads,
            head_dim=WIDTH,
            max_positions=MAX_POSITIONS,
            seed=(7, 0),
            **{"rotary": False} | options,
        )
    )
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=draw)
    return module.to(dtype)


def with_projections(module: AttentionLayer) -> AttentionLayer:
    """Make a layer derive what the projections of its input would give from the one key per token that tests pass.

    Several keys per position are rotations of it; see `with_further` for the further projection.
    """
    if module.keys_per_head > 1:

        class Projecting(type(module)):
            def keys(self, k: Tensor) -> Tensor:
                return torch.stack([k.roll(r, -1) * 0.8**r for r in range(self.keys_per_head)], 2)

            def forward(self, q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Tensor:
                return super().forward(q, self.keys(k), *rest, **options)

            def extend(self, q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
                return super().extend(q, self.keys(k), *rest, **options)

        module.__class__ = Projecting
    return with_further(module)


def with_further(module: AttentionLayer) -> AttentionLayer:
    """Make a layer that needs a further projection of its input take the keys' first channels for it, bounded by 1.

    Logits of a decay are not of the keys' scale: at 50, none of the earlier state is left.
    """
    if module.spec.further:

        class Projecting(type(module)):
            def logits(self, k: Tensor) -> Tensor:
                return k[..., : self.spec.further].tanh()

            def forward(
                self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs = DEFAULT_INPUTS
            ) -> Tensor:
                return super().forward(q, k, v, replace(inputs, further=self.logits(k)))

            def extend(self, q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
                return super().extend(q, k, *rest, **options, further=self.logits(k))

        module.__class__ = Projecting
    return module


def shard_of(
    whole: AttentionLayer,
    name: str,
    heads: HeadShard = ALL_HEADS,
    kv_heads: int = KV_HEADS,
    causal: bool = True,
) -> AttentionLayer:
    """The tensor-parallel shard of `whole` for `heads`, with its weights partitioned as the layer declares."""
    sizes = {"num_heads": HEADS, "num_kv_heads": kv_heads, "head_dim": WIDTH, "max_positions": MAX_POSITIONS}
    part = with_projections(
        build(TREES[name], **sizes, causal=causal, seed=(7, 0), heads=heads, rotary=False)
    )
    weights = {
        key: partition_of(part, key, kv_heads).shard(value, heads.rank, heads.size)
        for key, value in whole.state_dict().items()
    }
    part.double().load_state_dict(weights)
    return part


def partition_of(part: AttentionLayer, key: str, kv_heads: int = KV_HEADS) -> Partition:
    """How a layer declares that shards like `part` have a parameter or buffer."""
    copies = 1 if key in part.per_query_head else max(1, part.heads.size // kv_heads)
    dimension = part.sharded_parameters().get(key)
    return Partition(dimension, copies=1 if dimension is None else copies)


def tokens(
    batch: int, length: int, *, seed: int = 0, dtype: torch.dtype = torch.float64, kv_heads: int = KV_HEADS
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with gradients."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, HEADS, length, WIDTH),
        (batch, kv_heads, length, WIDTH),
        (batch, kv_heads, length, WIDTH),
    )
    q, k, v = (
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    )
    return q, k, v


def packed(length: int, *starts: tuple[int, ...]) -> Tensor:
    """Positions (B, N) of sequences whose documents start at 0 and at the given indices."""
    rows = []
    for row in starts:
        edges = [0, *row, length]
        rows.append(torch.cat([torch.arange(end - start) for start, end in pairwise(edges)]))
    return torch.stack(rows)


def gradients(module: AttentionLayer, out: Tensor, *inputs: Tensor, seed: int = 3) -> list[Tensor]:
    """Gradients of a fixed random weighted sum of the output, with respect to the inputs and all parameters."""
    draw = torch.Generator().manual_seed(seed)
    weights = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    leaves = [*inputs, *module.parameters()]
    return list(torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True, materialize_grads=True))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Equal up to rounding of float64 sums in another order."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

"""The points of the algebra that every property is tested on, and inputs for them."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megakernel.attention import ALL_HEADS, AttentionLayer, HeadShard, build

UNNORMALIZED = {"kernelized"}
"""Mechanisms whose weights do not add up to 1."""

SMALL_BLOCKS = {"compression": {"block_size": 4, "rank": 2}}

MECHANISMS: dict[str, dict[str, Any]] = {
    "softmax": {"preset": "softmax"},
    "local": {"preset": "local", "near": {"block_size": 4}},
    "local_two_blocks": {"preset": "local", "near": {"block_size": 4, "blocks": 2}},
    "gaussian": {"preset": "gaussian"},
    "kernelized": {"preset": "kernelized"},
    "mgk": {"preset": "mgk"},
    "smgk": {"preset": "smgk", "mixture": {"keys": 3, "sigma2": [1.0, 3.0, 0.5]}},
    "mgk_hard": {"preset": "mgk", "mixture": {"estep": "hard"}},
    "mgk_m_step": {"preset": "mgk", "mixture": {"m_step": True}},
    "mgk_softmax": {"preset": "mgk", "similarity": "softmax"},
    "linear": {"preset": "linear"},
    "performer": {"preset": "performer"},
    "hedgehog": {"preset": "hedgehog"},
    "mlk": {"preset": "mlk"},
    "smlk_favor": {"preset": "smlk", "feature_map": {"name": "favor"}},
    "linformer_causal": {"preset": "linformer_causal", "compression": {"block_size": 2, "rank": 1}},
    "linformer_causal_gated": {
        "preset": "linformer_causal",
        "compression": {"block_size": 2, "rank": 1, "per_head": True},
        "near": {"join": "gated", "blocks": 2},
        "far_rope": "centroid",
    },
    "eva": {"preset": "eva", "eva": {"window_size": 4, "chunk_size": 2}},
    "eva_overlap": {
        "preset": "eva",
        "eva": {"window_size": 4, "chunk_size": 2, "overlap": True, "exclude_window": True},
    },
    "rff": {"preset": "rff"},
    "gmm_rks": {"preset": "gmm_rks"},
    "gmm_rks_untied": {
        "preset": "gmm_rks",
        "feature_map": {"components": 3, "tied": False, "smoothing": 1.0},
    },
    "gmm_prf": {"preset": "gmm_prf"},
    "fastfood_rks": {"preset": "fastfood_rks"},
    "fastfood_prf": {"preset": "fastfood_prf", "feature_map": {"learn": "S", "smoothing": 0.5}},
    # Learned cosines alone may leave a denominator near 0, which rounding then reaches; KL smooths with 1 too.
    "generative_rks": {"preset": "generative_rks", "feature_map": {"smoothing": 1.0}},
    "generative_prf": {"preset": "generative_prf"},
    "flurka": {"preset": "flurka", **SMALL_BLOCKS},
    "flurka_two_blocks": {"preset": "flurka", **SMALL_BLOCKS, "near": {"blocks": 2}},
    "flurka_head_gate": {
        "preset": "flurka",
        **SMALL_BLOCKS,
        "near": {"gate": "head"},
        "feature_map": {"name": "elu"},
    },
    "flurka_centroid": {"preset": "flurka", **SMALL_BLOCKS, "far_rope": "centroid"},
    "flurka_per_head": {"preset": "flurka", "compression": {"block_size": 4, "rank": 2, "per_head": True}},
    "flurka_one_pool": {"preset": "flurka", "compression": {"block_size": 4, "rank": 2, "share_kv": True}},
    "flurka_uneven_rank": {"preset": "flurka", "compression": {"block_size": 5, "rank": 3}},
    "flurka_shared": {"preset": "flurka", **SMALL_BLOCKS, "near": {"join": "shared"}},
    "flurka_shared_favor": {
        "preset": "flurka",
        **SMALL_BLOCKS,
        "near": {"join": "shared", "blocks": 2},
        "feature_map": {"name": "favor"},
    },
    "flurka_gmm_rks": {
        "preset": "flurka",
        **SMALL_BLOCKS,
        "feature_map": {"name": "gmm_rks", "smoothing": 1.0},
    },
    "flurka_shared_fastfood": {
        "preset": "flurka",
        **SMALL_BLOCKS,
        "near": {"join": "shared"},
        "feature_map": {"name": "fastfood_prf", "learn": "fixed"},
    },
    "flurka_generative": {"preset": "flurka", **SMALL_BLOCKS, "feature_map": {"name": "generative_prf"}},
    "flurka_kernel": {"preset": "flurka_kernel", **SMALL_BLOCKS},
    "flurka_kernel_gmm_prf": {
        "preset": "flurka_kernel",
        **SMALL_BLOCKS,
        "feature_map": {"name": "gmm_prf", "components": 3},
    },
    "flurka_kernel_rff": {"preset": "flurka_kernel", **SMALL_BLOCKS, "feature_map": {"name": "rff"}},
    "flurka_kernel_favor": {
        "preset": "flurka_kernel",
        **SMALL_BLOCKS,
        "near": {"blocks": 2},
        "feature_map": {"name": "favor"},
        "far_rope": "centroid",
    },
    "local_mixture": {"preset": "local", "near": {"block_size": 4}, "mixture": {}},
    "linformer_causal_mixture": {
        "preset": "linformer_causal",
        "compression": {"block_size": 2, "rank": 1},
        "mixture": {},
    },
    "linformer_causal_gated_mixture": {
        "preset": "linformer_causal",
        "compression": {"block_size": 2, "rank": 1, "per_head": True},
        "near": {"join": "gated", "blocks": 2},
        "mixture": {"kind": "shifted", "keys": 3},
        "far_rope": "centroid",
    },
    "flurka_mlk": {"preset": "flurka", **SMALL_BLOCKS, "mixture": {}, "far_rope": "centroid"},
    "flurka_smlk": {"preset": "flurka", **SMALL_BLOCKS, "mixture": {"kind": "shifted", "keys": 3}},
    "flurka_kernel_mlk": {
        "preset": "flurka_kernel",
        "compression": {"block_size": 4, "rank": 2, "per_head": True},
        "mixture": {},
    },
    "flurka_shared_favor_mlk": {
        "preset": "flurka",
        **SMALL_BLOCKS,
        "near": {"join": "shared", "blocks": 2},
        "feature_map": {"name": "favor"},
        "mixture": {},
    },
    "flurka_kernel_favor_smlk": {
        "preset": "flurka_kernel",
        **SMALL_BLOCKS,
        "feature_map": {"name": "favor"},
        "mixture": {"kind": "shifted"},
        "far_rope": "centroid",
    },
}
"""Name -> tree of a causal mechanism, with blocks small enough that a short sequence has many."""

BIDIRECTIONAL: dict[str, dict[str, Any]] = {
    "softmax": {"preset": "softmax"},
    "linear": {"preset": "linear"},
    "performer": {"preset": "performer"},
    "gmm_rks": {"preset": "gmm_rks", "feature_map": {"smoothing": 1.0}},
    "fastfood_prf": {"preset": "fastfood_prf", "feature_map": {"learn": "fixed"}},
    "generative_prf": {"preset": "generative_prf"},
    "gaussian": {"preset": "gaussian"},
    "kernelized": {"preset": "kernelized"},
    "mgk": {"preset": "mgk"},
    "smgk_hard": {"preset": "smgk", "mixture": {"estep": "hard"}},
    "mlk": {"preset": "mlk"},
    "skyformer": {"preset": "skyformer", "skyformer": {"features": 12}},
    "skyformer_shared_strata": {
        "preset": "skyformer",
        "skyformer": {"features": 13, "draw": "stratified", "per_head": False},
    },
    "eva": {"preset": "eva", "eva": {"window_size": 4, "chunk_size": 3}},
    "eva_overlap": {
        "preset": "eva",
        "eva": {"window_size": 4, "chunk_size": 2, "overlap": True, "exclude_window": True},
    },
    "flurka_eva": {
        "preset": "flurka_eva",
        "eva": {"window_size": 4},
        "compression": {"rank": 7, "compress": "projected"},
    },
    "linformer": {"preset": "linformer", "compression": {"rank": 5, "compress": "projected"}},
    "linformer_per_head": {"preset": "linformer", "compression": {"rank": 5, "per_head": True}},
    "flurka_rnn": {
        "preset": "flurka_rnn",
        "compression": {"rank": 5, "share_kv": True, "compress": "projected"},
    },
    "flurka_performer": {"preset": "flurka_performer", "compression": {"rank": 5, "compress": "projected"}},
    "low_rank_blocks": {
        "similarity": "softmax",
        "compression": {"block_size": 4, "rank": 2, "compress": "projected"},
        "far_rope": "centroid",
    },
    "flurka_gmm_prf": {
        "preset": "flurka_rnn",
        "feature_map": {"name": "gmm_prf"},
        "compression": {"rank": 5, "compress": "projected"},
    },
    "linformer_mixture": {
        "preset": "linformer",
        "compression": {"rank": 5, "compress": "projected"},
        "mixture": {"kind": "shifted", "keys": 3},
    },
    "low_rank_blocks_mixture": {
        "similarity": "softmax",
        "compression": {"block_size": 4, "rank": 2, "per_head": True},
        "mixture": {},
        "far_rope": "centroid",
    },
    "flurka_performer_mixture": {
        "preset": "flurka_performer",
        "compression": {"rank": 5, "per_head": True},
        "mixture": {},
    },
    "flurka_pool": {
        "similarity": "kernel",
        "feature_map": {"name": "hedgehog"},
        "compression": {"kind": "pool", "block_size": 4, "compress": "projected"},
    },
    "nystromformer": {"preset": "nystromformer", "nystromformer": {"landmarks": 5}},
    "nystromformer_conv": {"preset": "nystromformer", "nystromformer": {"landmarks": 5, "conv_kernel": 3}},
}
"""Name -> tree of a mechanism that sees later tokens too."""

HEADS, KV_HEADS, WIDTH = 4, 2, 6
LONGEST = 64
"""Columns of Linformer's matrices."""


def layer(
    name: str, *, dtype: torch.dtype = torch.float64, kv_heads: int = KV_HEADS, **options: Any
) -> AttentionLayer:
    """A layer whose parameters have moved away from their initial values, where gates and masses would cancel."""
    tree = (MECHANISMS if options.get("causal", True) else BIDIRECTIONAL)[name]
    module = with_projections(
        build(
            tree,
            num_heads=HEADS,
            num_kv_heads=kv_heads,
            head_dim=WIDTH,
            max_positions=LONGEST,
            seed=(7, 0),
            **options,
        )
    )
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=draw)
    return module.to(dtype)


def with_projections(module: AttentionLayer) -> AttentionLayer:
    """A layer that wants several projected keys at a position makes them of the one it is handed."""
    if module.keys_per_head > 1:
        attend = module.attend

        def projected(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
            mixed = torch.stack([k.roll(r, -1) * 0.8**r for r in range(module.keys_per_head)], 2)
            return attend(q, mixed, v, **options)

        module.attend = projected
    return module


def shard_of(
    whole: AttentionLayer,
    name: str,
    heads: HeadShard = ALL_HEADS,
    kv_heads: int = KV_HEADS,
    causal: bool = True,
) -> AttentionLayer:
    """The layer that holds some heads of `whole`, with its weights cut as the layer says."""
    tree = (MECHANISMS if causal else BIDIRECTIONAL)[name]
    sizes = {"num_heads": HEADS, "num_kv_heads": kv_heads, "head_dim": WIDTH, "max_positions": LONGEST}
    part = with_projections(build(tree, **sizes, causal=causal, seed=(7, 0), heads=heads))
    cut = part.sharded_parameters()
    weights = {
        key: value.chunk(heads.size, cut[key])[heads.rank] if key in cut else value
        for key, value in whole.state_dict().items()
    }
    part.double().load_state_dict(weights)
    return part


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
    """Positions (B, N) of rows whose documents start at the given places, and at 0."""
    rows = []
    for row in starts:
        edges = [0, *row, length]
        rows.append(torch.cat([torch.arange(end - start) for start, end in pairwise(edges)]))
    return torch.stack(rows)


def gradients(module: AttentionLayer, out: Tensor, *inputs: Tensor, seed: int = 3) -> list[Tensor]:
    """Gradients of a fixed random sum of the output in the inputs and all parameters."""
    draw = torch.Generator().manual_seed(seed)
    weights = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    wanted = [*inputs, *module.parameters()]
    return list(torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True, materialize_grads=True))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Equal up to the rounding of float64 sums in another order."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

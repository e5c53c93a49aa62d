"""The points of the algebra that every property is tested on, and inputs for them."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megakernel.attention import ALL_HEADS, AttentionLayer, HeadShard, build
from megakernel.config.attention import PRESETS

SMALL_BLOCKS = {"compression": {"block_size": 4, "rank": 2}}

MECHANISMS: dict[str, dict[str, Any]] = {
    "softmax": {"preset": "softmax"},
    "local": {"preset": "local", "near": {"block_size": 4}},
    "local_two_blocks": {"preset": "local", "near": {"block_size": 4, "blocks": 2}},
    "linear": {"preset": "linear"},
    "performer": {"preset": "performer"},
    "hedgehog": {"preset": "hedgehog"},
    "rff": {"preset": "rff"},
    "gmm_rks": {"preset": "gmm_rks"},
    "gmm_rks_untied": {"preset": "gmm_rks", "feature_map": {"components": 3, "tied": False, "smoothing": 1.0}},
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
}
"""Name -> tree. Every preset is among them, with blocks small enough that a short sequence has many."""

assert {tree["preset"] for tree in MECHANISMS.values()} == set(PRESETS)

HEADS, KV_HEADS, WIDTH = 4, 2, 6


def layer(
    name: str, *, dtype: torch.dtype = torch.float64, kv_heads: int = KV_HEADS, **options: Any
) -> AttentionLayer:
    """A layer whose parameters have moved away from their initial values, where gates and masses would cancel."""
    module = build(
        MECHANISMS[name], num_heads=HEADS, num_kv_heads=kv_heads, head_dim=WIDTH, seed=(7, 0), **options
    )
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=draw)
    return module.to(dtype)


def shard_of(
    whole: AttentionLayer, name: str, heads: HeadShard = ALL_HEADS, kv_heads: int = KV_HEADS
) -> AttentionLayer:
    """The layer that holds some heads of `whole`, with its weights cut as the layer says."""
    part = build(
        MECHANISMS[name], num_heads=HEADS, num_kv_heads=kv_heads, head_dim=WIDTH, seed=(7, 0), heads=heads
    )
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

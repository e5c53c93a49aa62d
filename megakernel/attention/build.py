"""From a point of the algebra to a module."""

from typing import Any

from megakernel.attention.eva import CausalEvaAttention, EvaAttention, FlurkaEvaAttention
from megakernel.attention.flurka import FlurkaAttention
from megakernel.attention.heads import ALL_HEADS, HeadShard, Seed
from megakernel.attention.kernel import KernelAttention
from megakernel.attention.landmark import LandmarkAttention
from megakernel.attention.layer import AttentionLayer
from megakernel.attention.local import LocalAttention
from megakernel.attention.low_rank import LowRankAttention
from megakernel.attention.mixture import PairwiseAttention
from megakernel.attention.nystromformer import NystromformerAttention
from megakernel.attention.skyformer import SkyformerAttention
from megakernel.attention.softmax import SoftmaxAttention
from megakernel.config.attention import Attention, expand_preset
from megakernel.config.eva import Eva
from megakernel.config.landmark import Nystromformer, Skyformer
from megakernel.config.parallel import SoftmaxExchange


def build(
    attention: str | dict[str, Any] | Attention,
    *,
    num_heads: int,
    head_dim: int,
    causal: bool = True,
    num_kv_heads: int | None = None,
    max_positions: int | None = None,
    seed: Seed = 0,
    heads: HeadShard = ALL_HEADS,
    softmax_exchange: SoftmaxExchange = "auto",
) -> AttentionLayer:
    """The attention module of one layer.

    Args:
        attention: a preset's name, a tree (`{preset: NAME, ...changes}` included) or a validated tree.
        num_heads: query heads of the whole layer, over all shards.
        head_dim: width d of a head.
        causal: whether a token sees only itself and earlier tokens.
        num_kv_heads: key/value heads of the whole layer; None takes num_heads.
        max_positions: tokens of the longest row, which linformer's matrices have a column for.
        seed: what random matrices depend on beside the head, usually (run seed, layer).
        heads: the shard of the layer's heads that the module holds; its parameters are slices of the whole layer's.
        softmax_exchange: how full softmax meets the keys of other shards: `heads` trades tokens for heads, which must
            divide over the shards, `ring` passes keys and values round, `auto` is heads where they divide.

    Raises:
        ValueError: an unknown preset or key, heads that do not divide, a mechanism that is causal only.
    """
    form = (
        attention if isinstance(attention, Attention) else Attention.model_validate(expand_preset(attention))
    )
    kv_heads = num_kv_heads or num_heads
    if causal and form.mixes_future_tokens:
        raise ValueError(
            f"{form.mixes_future_tokens}; build with causal=False or take compression: block with near"
        )
    if form.mechanism == "skyformer":
        sky = form.skyformer or Skyformer()
        return SkyformerAttention(sky, num_heads, kv_heads, head_dim, seed, heads)
    if form.mechanism == "nystromformer":
        nystrom = form.nystromformer or Nystromformer()
        return NystromformerAttention(nystrom, num_heads, kv_heads, head_dim, heads)
    if form.looks_back_only and not causal:
        raise ValueError(f"{form.looks_back_only}; remove it or build with causal=True")
    if form.mechanism == "eva" and form.compression is not None:
        return FlurkaEvaAttention(form, num_heads, kv_heads, head_dim, max_positions, seed, heads)
    if form.mechanism == "eva":
        eva = CausalEvaAttention if causal else EvaAttention
        return eva(form.eva or Eva(), num_heads, kv_heads, head_dim, seed, heads)
    if form.compression is not None and form.near is None:
        return LowRankAttention(form, num_heads, kv_heads, head_dim, max_positions, seed, heads)
    if form.compression is not None and form.similarity == "softmax":
        return LandmarkAttention(form, num_heads, kv_heads, head_dim, seed, heads)
    if form.compression is not None:
        return FlurkaAttention(form, num_heads, kv_heads, head_dim, seed, heads)
    if form.near is not None:
        return LocalAttention(form, num_heads, kv_heads, head_dim, seed, heads)
    if form.feature_map is not None:
        return KernelAttention(form, num_heads, kv_heads, head_dim, causal, seed, heads)
    if form.similarity == "gaussian" or form.mixture is not None:
        return PairwiseAttention(form, num_heads, kv_heads, head_dim, causal, seed, heads)
    return SoftmaxAttention(num_heads, kv_heads, head_dim, causal, form.window, softmax_exchange, heads)

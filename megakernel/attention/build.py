"""From a point of the algebra to a module."""

from typing import Any

from megakernel.attention.flurka import FlurkaAttention
from megakernel.attention.heads import ALL_HEADS, HeadShard, Seed
from megakernel.attention.kernel import KernelAttention
from megakernel.attention.layer import AttentionLayer
from megakernel.attention.local import LocalAttention
from megakernel.attention.softmax import SoftmaxAttention
from megakernel.config.attention import Attention, expand_preset


def build(
    attention: str | dict[str, Any] | Attention,
    *,
    num_heads: int,
    head_dim: int,
    causal: bool = True,
    num_kv_heads: int | None = None,
    seed: Seed = 0,
    heads: HeadShard = ALL_HEADS,
) -> AttentionLayer:
    """The attention module of one layer.

    Args:
        attention: a preset's name, a tree (`{preset: NAME, ...changes}` included) or a validated tree.
        num_heads: query heads of the whole layer, over all shards.
        head_dim: width d of a head.
        causal: whether a token sees only itself and earlier tokens.
        num_kv_heads: key/value heads of the whole layer; None takes num_heads.
        seed: what random matrices depend on beside the head, usually (run seed, layer).
        heads: the shard of the layer's heads that the module holds; its parameters are slices of the whole layer's.

    Raises:
        ValueError: an unknown preset or key, heads that do not divide, a mechanism that is causal only.
    """
    form = (
        attention if isinstance(attention, Attention) else Attention.model_validate(expand_preset(attention))
    )
    kv_heads = num_kv_heads or num_heads
    if form.near is not None and not causal:
        raise ValueError("attention with a near window is causal; remove near or build with causal=True")
    if form.compression is not None:
        return FlurkaAttention(form, num_heads, kv_heads, head_dim, seed, heads)
    if form.near is not None:
        return LocalAttention(form.near, num_heads, kv_heads, head_dim, heads)
    if form.feature_map is not None:
        return KernelAttention(form.feature_map, num_heads, kv_heads, head_dim, causal, seed, heads)
    return SoftmaxAttention(num_heads, kv_heads, head_dim, causal, heads)

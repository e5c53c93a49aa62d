"""Builds the module of an attention mechanism from its configuration."""

from importlib import import_module
from typing import Any

from megakernel.attention.heads import ALL_HEADS, HeadShard, LayerSettings, Seed
from megakernel.attention.layer import AttentionLayer
from megakernel.config.attention import Attention, expand_preset
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
    rotary: bool = True,
) -> AttentionLayer:
    """The attention module of one layer.

    Args:
        attention: a preset's name, a dict (such as `{preset: NAME, ...changes}`) or a validated configuration.
        num_heads: query heads of the whole layer, over all shards.
        num_kv_heads: key/value heads of the whole layer; None: num_heads.

    The other arguments are those of `LayerSettings`.

    Raises:
        ValueError: an unknown preset or key, sizes below 1, heads that do not divide, a mechanism that cannot be (or
            must be) causal.
    """
    config = (
        attention if isinstance(attention, Attention) else Attention.model_validate(expand_preset(attention))
    )
    if causal and config.mixes_future_tokens:
        raise ValueError(
            f"{config.mixes_future_tokens}; build with causal=False or take compression: block with near"
        )
    if config.looks_back_only and not causal:
        raise ValueError(f"{config.looks_back_only}; remove it or build with causal=True")
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size}; expected at least 1")
    settings = LayerSettings(
        num_heads, num_kv_heads, head_dim, causal, max_positions, seed, heads, softmax_exchange, rotary
    )
    spec = config.spec
    return layer_class((causal and spec.causal_layer) or spec.layer)(config, settings)


def layer_class(path: str) -> type[AttentionLayer]:
    """The class at a path below `megakernel`; the configuration has paths, because it must not import torch."""
    module, _, name = path.rpartition(".")
    cls: type[AttentionLayer] = getattr(import_module(f"megakernel.{module}"), name)
    return cls

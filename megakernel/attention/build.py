"""From a point of the algebra to a module."""

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
) -> AttentionLayer:
    """The attention module of one layer.

    Args:
        attention: a preset's name, a tree (`{preset: NAME, ...changes}` included) or a validated tree.
        num_heads: query heads of the whole layer, over all shards.
        num_kv_heads: key/value heads of the whole layer; None takes num_heads.

    The others are those of `LayerSettings`.

    Raises:
        ValueError: an unknown preset or key, heads that do not divide, a mechanism that is causal only.
    """
    form = (
        attention if isinstance(attention, Attention) else Attention.model_validate(expand_preset(attention))
    )
    if causal and form.mixes_future_tokens:
        raise ValueError(
            f"{form.mixes_future_tokens}; build with causal=False or take compression: block with near"
        )
    if form.looks_back_only and not causal:
        raise ValueError(f"{form.looks_back_only}; remove it or build with causal=True")
    settings = LayerSettings(
        num_heads, num_kv_heads or num_heads, head_dim, causal, max_positions, seed, heads, softmax_exchange
    )
    spec = form.spec
    return layer_class((causal and spec.causal_layer) or spec.layer)(form, settings)


def layer_class(place: str) -> type[AttentionLayer]:
    """The class that a mechanism names: the configuration, which knows all of them, loads no torch."""
    module, name = place.split(".")
    kind: type[AttentionLayer] = getattr(import_module(f"megakernel.attention.{module}"), name)
    return kind

"""From the weights of a model to those of another attention: FLuRKA out of what it is a variant of (FLuRKA, section 5).

Causal kernel attention is FLuRKA whose blocks have as many landmarks as tokens, and low-rank attention has its E and F.
So FLuRKA starts from either, and then from itself with fewer landmarks.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel import attention
from megakernel.attention.compression import pooling_logits
from megakernel.config import Attention, Model, UserError
from megakernel.config.algebra import BlockCompression

from .landmarks import check_merge, fewer_landmarks
from .universal import STATE, WEIGHT, WholeTensors

_CORE = ".self_attention.core."
_QKV = ".self_attention.qkv.weight"
_PROJECTION, _MIXTURE = "projection.", "mixture."
_POOLS = ("pool_keys", "pool_values")
"""E and F in FLuRKA; the first makes both where it is alone."""
_BOTH = "compressor.matrices"
"""E and F in low-rank attention."""


class Recipe(NamedTuple):
    """How a tensor of the new model is made."""

    sources: tuple[str, ...]
    """Of which tensors of the old one, at most one."""

    make: Callable[..., Tensor] | None = None
    """How; None: it is the same tensor, with whatever else is known of it."""


class Converted:
    """A checkpoint as one of a model whose layers have another attention (`WholeTensors`).

    It has what follows from the checkpoint: all around the mechanisms; feature maps, mixtures, gates and masses that
    old and new mechanisms share; and E and F of FLuRKA, from those of low-rank attention or of FLuRKA with more
    landmarks, or from the tokens of kernel attention as if they were landmarks. For the rest a new model's initial
    values stand.
    """

    def __init__(self, source: WholeTensors, before: Model, after: Model):
        """before: the model that the checkpoint is of; after: one of the same sizes.

        Raises UserError where E and F of a layer cannot become the new ones.
        """
        self._source = source
        self._recipes = {name: Recipe((name,)) for name in source.names if _CORE not in name}
        layers = sorted(int(name.removesuffix(_QKV)) for name in source.names if name.endswith(_QKV))
        for index, number in enumerate(layers):
            prefix = f"{number}{_CORE}"
            own = {name.removeprefix(prefix) for name in source.names if name.startswith(prefix)}
            for name, recipe in _core_recipes(own, before, after, index).items():
                there = tuple(prefix + source for source in recipe.sources)
                self._recipes[prefix + name] = recipe._replace(sources=there)

    @property
    def names(self) -> set[str]:
        """All that the checkpoint determines."""
        return set(self._recipes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        recipe = self._recipes[name]
        if recipe.make is None:
            return self._source.shape(recipe.sources[0])
        return tuple(self.read(name, [WEIGHT])[WEIGHT].shape)

    def read(self, name: str, keys: Iterable[str] = STATE) -> dict[str, Tensor]:
        """Those of `keys` that are known of a tensor; of one that is remade its value."""
        recipe = self._recipes[name]
        if recipe.make is None:
            return self._source.read(recipe.sources[0], keys)
        if WEIGHT not in keys:
            return {}
        return {
            WEIGHT: recipe.make(*(self._source.read(source, [WEIGHT])[WEIGHT] for source in recipe.sources))
        }


def _core_recipes(own: set[str], before: Model, after: Model, index: int) -> dict[str, Recipe]:
    """Name within the mechanism -> how the layer's new tensor is made of its `own` old ones."""
    old, new = before.layer_attention(index), after.layer_attention(index)
    wanted = _tensor_names(new, after)
    kept = own & wanted
    if old.feature_map != new.feature_map:
        kept = {name for name in kept if not name.startswith(_PROJECTION)}
    if old.mixture != new.mixture:
        kept = {name for name in kept if not name.startswith(_MIXTURE)}
    recipes = {name: Recipe((name,)) for name in kept}
    if old.compression == new.compression and kept & {_BOTH, *_POOLS}:
        return recipes
    try:
        pools = _pool_recipes(own, old, new, after.kv_heads)
    except UserError as error:
        raise UserError(f"layer {index}: {error}") from None
    return recipes | {name: recipe for name, recipe in pools.items() if name in wanted}


def _tensor_names(form: Attention, model: Model) -> set[str]:
    """Names of a mechanism's parameters and buffers, which no number of heads changes."""
    with torch.device("meta"):
        core = attention.build(
            form,
            num_heads=1,
            head_dim=model.head_size,
            causal=model.is_causal,
            max_positions=model.max_positions or 1,
        )
    return set(core.state_dict())


def _pool_recipes(own: set[str], old: Attention, new: Attention, kv_heads: int) -> dict[str, Recipe]:
    """How E and F of FLuRKA are made; nothing where the old layer says nothing of them."""
    was, will = old.compression, new.compression
    if not isinstance(will, BlockCompression):
        return {}
    if was is None and old.similarity == "kernel":
        check_merge(will.block_size, will.rank)
        heads = kv_heads if will.per_head else None
        tokens = pooling_logits(will.block_size, will.block_size)
        return dict.fromkeys(_POOLS, Recipe((), partial(_changed, tokens, rank=will.rank, heads=heads)))
    if not isinstance(was, BlockCompression):
        return {}
    if was.block_size != will.block_size:
        raise _fixed("block_size", will.block_size, was.block_size)
    if was.per_head and not will.per_head:
        raise _fixed("per_head", False, True)
    if will.share_kv and not was.share_kv:
        raise _fixed("share_kv", True, False)
    check_merge(was.rank, will.rank)
    heads = kv_heads if will.per_head and not was.per_head else None
    found = {}
    for index, name in enumerate(_POOLS):
        source = next(x for x in (name, _POOLS[0], _BOTH) if x in own)
        part = index if source == _BOTH else None
        found[name] = Recipe((source,), partial(_changed, part=part, rank=will.rank, heads=heads))
    return found


def _fixed(key: str, will: Any, was: Any) -> UserError:
    return UserError(
        f"compression.{key}={will} was {was} in the weights that it starts from; leave it at {was}"
    )


def _changed(logits: Tensor, *, part: int | None = None, rank: int, heads: int | None) -> Tensor:
    """E or F of logits (..., r, b), or that `part` of (..., 1 or 2, r, b), for `rank` landmarks and each of `heads`."""
    if part is not None:
        logits = logits.select(-3, min(part, logits.shape[-3] - 1))
    fewer = fewer_landmarks(logits, rank)
    return fewer.clone() if heads is None else fewer.repeat(heads, 1, 1)

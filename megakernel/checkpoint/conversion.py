"""A checkpoint's weights as another model begins with them.

Of a model of another attention they become FLuRKA out of what it is a variant of (FLuRKA, section 5). Causal kernel
attention is FLuRKA whose blocks have as many landmarks as tokens, and low-rank attention has its E and F. So FLuRKA
starts from either, and then from itself with fewer landmarks. Low-rank updates are folded into the projections that
they update, and weights that a half-precision run has frozen are as precise as it was given them.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel import attention
from megakernel.attention.compression import OWN_SHARE, own_stretch, pooling_logits
from megakernel.config import Attention, Config, Lora, Model, UserError
from megakernel.config.algebra import BlockCompression
from megakernel.model.self_attention import UPDATES

from .universal import STATE, WEIGHT, WholeTensors


def fewer_landmarks(logits: Tensor, rank: int) -> Tensor:
    """Logits (..., r', b) whose landmarks stand for equal groups of those of `logits` (..., r, b), rows softmaxed.

    A landmark's weights are the mean of its group's. It counts b / r' tokens, as many as its group, so where the keys
    of a block are alike nothing changes. Where a group looked at its own stretch of the block alone, as landmarks
    that are tokens do, a tenth of the weight moves to the rest of the block: without it no gradient would.

    Raises UserError where r' does not divide r.
    """
    there, size = logits.shape[-2:]
    check_merge(there, rank)
    if rank == there:
        return logits
    weights = logits.double().softmax(-1).unflatten(-2, (rank, -1)).mean(-2)
    own = own_stretch(rank, size).to(weights.device)
    outside = weights.masked_fill(own, 0.0)
    share = outside.sum(-1, keepdim=True)
    least = 1 - OWN_SHARE
    raised = weights.masked_fill(~own, 0.0) * (OWN_SHARE / (1 - share)) + outside * (least / share)
    # With one landmark nothing lies outside its stretch.
    return torch.where((share < least) & (rank > 1), raised, weights).log().to(logits.dtype)


def check_merge(there: int, rank: int) -> None:
    """Raise UserError unless the landmarks that a block has make equal groups for `rank` of them."""
    if there % rank:
        divisors = ", ".join(str(n) for n in range(1, there + 1) if there % n == 0)
        raise UserError(
            f"compression.rank={rank} does not divide {there}, the landmarks or tokens of a block that are merged "
            f"into so many; take one of {divisors}"
        )


def rank_steps(block_size: int, rank: int) -> list[int]:
    """Landmarks of a block from one for each token down to `rank`, each number dividing the one before: b, ..., r.

    As many steps as there are, so that each loses as little as it can. Raises UserError where r does not divide b.
    """
    check_merge(block_size, rank)
    steps = [block_size]
    while steps[-1] > rank:
        left = steps[-1] // rank
        steps.append(steps[-1] // next(n for n in range(2, left + 1) if left % n == 0))
    return steps


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
    """Of which tensors of the old one."""

    make: Callable[..., Tensor] | None = None
    """How; None: it is the first of them, with whatever else is known of it."""

    keeps_shape: bool = False
    """Whether it has the shape of the first of them."""


class Remade(WholeTensors):
    """A checkpoint as one of other tensors, which are made of its own."""

    def __init__(self, source: WholeTensors, recipes: Mapping[str, Recipe]):
        """recipes: by the name of the tensor that is made."""
        self._source, self._recipes = source, recipes

    @property
    def names(self) -> set[str]:
        """All that the checkpoint determines."""
        return set(self._recipes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        recipe = self._recipes[name]
        is_kept = recipe.make is None or recipe.keeps_shape
        return self._source.shape(recipe.sources[0]) if is_kept else super().shape(name)

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


def converted(source: WholeTensors, before: Model, after: Model) -> Remade:
    """A checkpoint as one of a model whose layers have another attention.

    It has what follows from the checkpoint: all around the mechanisms; feature maps, mixtures, gates and masses that
    old and new mechanisms share; and E and F of FLuRKA, from those of low-rank attention or of FLuRKA with more
    landmarks, or from the tokens of kernel attention as if they were landmarks. For the rest a new model's initial
    values stand.

    before: the model that the checkpoint is of; after: one of the same sizes.
    Raises UserError where E and F of a layer cannot become the new ones.
    """
    recipes = {name: Recipe((name,)) for name in source.names if _CORE not in name}
    layers = sorted(int(name.removesuffix(_QKV)) for name in source.names if name.endswith(_QKV))
    for index, number in enumerate(layers):
        prefix = f"{number}{_CORE}"
        own = {name.removeprefix(prefix) for name in source.names if name.startswith(prefix)}
        for name, recipe in _core_recipes(own, before, after, index).items():
            there = tuple(prefix + source for source in recipe.sources)
            recipes[prefix + name] = recipe._replace(sources=there)
    return Remade(source, recipes)


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


UPDATED = {
    "self_attention.qkv": ("query", "key", "value"),
    "self_attention.output": ("output",),
    "mlp.linear_fc1": ("gate", "up"),
    "mlp.linear_fc2": ("down",),
}
"""A layer's matrix -> the targets of low-rank updates that it is made of."""


def update_name(layer: str, module: str, target: str) -> str:
    """The name of a low-rank update of a layer's matrix."""
    return f"{layer}.{module.partition('.')[0]}.{target}_update"


def without_updates(source: WholeTensors, config: Config) -> WholeTensors:
    """A run's checkpoint as one of a model without low-rank updates; the same where it has none."""
    lora = config.optimizer.updates
    return source if lora is None else folded(source, config.model, lora)


def folded(source: WholeTensors, model: Model, lora: Lora) -> Remade:
    """A checkpoint with low-rank updates as one without: W + alpha / rank B A in place of W, in float32.

    An update may be smaller than what a frozen bfloat16 weight can tell apart. model: what the checkpoint is of.
    """
    there = source.names
    recipes = {name: Recipe((name,)) for name in there if UPDATES.search(name) is None}
    for module, targets in UPDATED.items():
        for name in [name for name in recipes if name.partition(".")[2] == f"{module}.weight"]:
            updates = {target: update_name(name.partition(".")[0], module, target) for target in targets}
            updates = {target: update for target, update in updates.items() if f"{update}.up" in there}
            if updates:
                parts = [f"{update}.{part}" for update in updates.values() for part in ("up", "down")]
                add = partial(_updated, list(updates), model, module, lora.alpha / lora.rank)
                recipes[name] = Recipe((name, *parts), add, keeps_shape=True)
    return Remade(source, recipes)


def _updated(
    targets: list[str], model: Model, module: str, scale: float, weight: Tensor, *parts: Tensor
) -> Tensor:
    """A layer's matrix in float32 with its updates. parts: B, then A, of each of `targets`."""
    whole = weight.detach().float().clone()
    rows = _rows(model, module, whole)
    factors = [part.detach().float() for part in parts]
    for target, up, down in zip(targets, factors[::2], factors[1::2]):
        rows[target] += scale * (up @ down).view(rows[target].shape)
    return whole


def _rows(model: Model, module: str, whole: Tensor) -> dict[str, Tensor]:
    """Target -> its rows of a matrix, views. Those of the projection to heads are grouped by key head."""
    if module == "self_attention.qkv":
        heads = whole.view(model.kv_heads, -1, model.head_size, whole.shape[-1])
        queries = model.num_heads // model.kv_heads
        return {"query": heads[:, :queries], "key": heads[:, queries:-1], "value": heads[:, -1:]}
    if module == "mlp.linear_fc1" and model.is_mlp_gated:
        half = len(whole) // 2
        return {"gate": whole[:half], "up": whole[half:]}
    return {UPDATED[module][-1]: whole}


class Unrounded(Remade):
    """A run's checkpoint in which weights that were never trained are those that the run began with.

    DeepSpeed keeps float32 masters of trained weights alone: the checkpoint has the others as the model computed with
    them, rounded to its dtype.
    """

    def __init__(self, checkpoint: WholeTensors, origin: Callable[[], WholeTensors]):
        """origin: finds what the run began with, under the same names; UserError where that is there no more."""
        super().__init__(checkpoint, {name: Recipe((name,)) for name in checkpoint.names})
        self._find = origin

    def read(self, name: str, keys: Iterable[str] = STATE) -> dict[str, Tensor]:
        """Those of `keys` that are known of a tensor."""
        found = super().read(name, keys)
        weight = found.get(WEIGHT)
        if weight is None or weight.dtype == torch.float32 or self._origin is None:
            return found
        if name not in self._origin.names:
            return found
        exact = self._origin.read(name, [WEIGHT])[WEIGHT]
        # What lies there may be another by now. It is the same where it rounds to what the run computed with.
        if exact.shape == weight.shape and exact.to(weight.dtype).equal(weight):
            found[WEIGHT] = exact
        return found

    @cached_property
    def _origin(self) -> WholeTensors | None:
        try:
            return self._find()
        except UserError:
            return None

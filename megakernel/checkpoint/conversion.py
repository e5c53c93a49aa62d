"""Conversion of a checkpoint's weights to the initial weights of another model.

FLuRKA can start from the mechanisms that it generalizes (FLuRKA, section 5): causal kernel attention is FLuRKA with
one landmark per token of a block, and low-rank attention has FLuRKA's E and F. It can also start from FLuRKA with more
landmarks. Low-rank updates are folded into the projections that they update. Weights that a half-precision run froze
are restored to the precision in which the run received them.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel import attention
from megakernel.attention.compression import SEGMENT_WEIGHT, landmark_segments, pooling_logits
from megakernel.config import Attention, Config, Lora, Model, UserError
from megakernel.config.algebra import BlockCompression
from megakernel.model.self_attention import MECHANISM, UPDATES, is_of_mechanism

from .fragments import WHOLE, Fragment
from .whole_tensors import STATE, WEIGHT, WholeTensors


def fewer_landmarks(logits: Tensor, rank: int) -> Tensor:
    """Merge the r landmarks of `logits` (..., r, b), softmaxed over b, into r' of equal groups: logits (..., r', b).

    A merged landmark's weights are the mean of its group's. Its token count is b / r', the sum of its group's, so
    nothing changes if the keys of a block are equal. If a group's weights lie within its own segment of the block, as
    those of single tokens do, a tenth of the weight moves to the rest of the block, which else would get no gradient.

    Raises UserError if r' does not divide r.
    """
    old_rank, size = logits.shape[-2:]
    check_merge(old_rank, rank)
    if rank == old_rank:
        return logits
    weights = logits.double().softmax(-1).unflatten(-2, (rank, -1)).mean(-2)
    own_mask = landmark_segments(rank, size).to(weights.device)
    outside = weights.masked_fill(own_mask, 0.0)
    share = outside.sum(-1, keepdim=True)
    min_share = 1 - SEGMENT_WEIGHT
    spread = weights.masked_fill(~own_mask, 0.0) * (SEGMENT_WEIGHT / (1 - share)) + outside * (
        min_share / share
    )
    # The segment of a single landmark is the whole block.
    return torch.where((share < min_share) & (rank > 1), spread, weights).log().to(logits.dtype)


def check_merge(landmarks: int, rank: int) -> None:
    """Raise UserError unless a block's landmarks can be merged into `rank` equal groups."""
    if landmarks % rank:
        divisors = ", ".join(str(n) for n in range(1, landmarks + 1) if landmarks % n == 0)
        raise UserError(
            f"compression.rank={rank} does not divide {landmarks}, the number of landmarks or tokens "
            f"of a block from which it is merged; take one of {divisors}"
        )


def rank_steps(block_size: int, rank: int) -> list[int]:
    """Numbers of landmarks per block, b, ..., r, each dividing the one before, from one per token down to `rank`.

    The sequence is the longest one, so that each step loses as little as possible. Raises UserError if r does not
    divide b.
    """
    check_merge(block_size, rank)
    steps = [block_size]
    while steps[-1] > rank:
        remaining = steps[-1] // rank
        steps.append(steps[-1] // next(n for n in range(2, remaining + 1) if remaining % n == 0))
    return steps


_QKV = ".self_attention.qkv.weight"
_PROJECTION, _MIXTURE = "projection.", "mixture."
_POOLS = ("pool_keys", "pool_values")
"""E and F in FLuRKA; with share_kv the first is both."""
_BOTH = "compressor.matrices"
"""E and F in low-rank attention."""


class Recipe(NamedTuple):
    """How to make one tensor of the new model."""

    sources: tuple[str, ...]
    """Names of the old model's tensors that it is made of."""

    make: Callable[..., Tensor] | None = None
    """Function of the sources; None: the tensor is the first source, with its optimizer state."""

    keeps_shape: bool = False
    """Whether it has the first source's shape."""


class DerivedTensors(WholeTensors):
    """A view of a checkpoint whose tensors are made from the checkpoint's by recipes."""

    def __init__(self, source: WholeTensors, recipes: Mapping[str, Recipe]):
        """recipes: by the name of the new tensor."""
        self._source, self._recipes = source, recipes

    @property
    def names(self) -> set[str]:
        """Names of the new tensors."""
        return set(self._recipes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a new tensor."""
        recipe = self._recipes[name]
        is_kept = recipe.make is None or recipe.keeps_shape
        return self._source.shape(recipe.sources[0]) if is_kept else super().shape(name)

    def read(self, name: str, keys: Iterable[str] = STATE, fragment: Fragment = WHOLE) -> dict[str, Tensor]:
        """Return the available `keys` of a tensor; a computed tensor has only its value, made from whole sources."""
        recipe = self._recipes[name]
        if recipe.make is None:
            return self._source.read(recipe.sources[0], keys, fragment)
        if WEIGHT not in keys:
            return {}
        sources = (self._source.read(source, [WEIGHT])[WEIGHT] for source in recipe.sources)
        return {WEIGHT: fragment.of(recipe.make(*sources))}


def convert_attention(source: WholeTensors, before: Model, after: Model) -> DerivedTensors:
    """Convert a checkpoint to a model whose layers have another attention mechanism.

    The result has every tensor that the checkpoint determines: all tensors outside of the mechanisms; feature maps,
    mixtures, gates and `far_mass` that old and new mechanisms share; and FLuRKA's E and F, made from those of low-rank
    attention or of FLuRKA with more landmarks, or, for kernel attention, with each token as a landmark. All other
    tensors keep the new model's initial values.

    before: the checkpoint's model; after: a model of the same sizes.
    Raises UserError if a layer's E and F cannot be converted, or if an encoder has another number of layers.
    """
    # Layers are named by their places, and a decoder's come after its encoder's.
    if before.encoder_layers != after.encoder_layers:
        raise UserError(
            f"init.from has a model with {before.encoder_layers} layers in its encoder, and this one has "
            f"{after.encoder_layers}, so that its decoder's layers would get weights of others; give a run with as many"
        )
    crosses_alike = _cross_attention(before) == _cross_attention(after)
    recipes = {
        name: Recipe((name,))
        for name in source.names
        if not is_of_mechanism(name) or (crosses_alike and MECHANISM not in name)
    }
    layers = sorted(int(name.removesuffix(_QKV)) for name in source.names if name.endswith(_QKV))
    for index, number in enumerate(layers):
        prefix = f"{number}{MECHANISM}"
        old_names = {name.removeprefix(prefix) for name in source.names if name.startswith(prefix)}
        for name, recipe in _core_recipes(old_names, before, after, index).items():
            old_sources = tuple(prefix + source for source in recipe.sources)
            recipes[prefix + name] = recipe._replace(sources=old_sources)
    return DerivedTensors(source, recipes)


def _cross_attention(model: Model) -> Attention | None:
    return None if model.encoder is None else model.encoder.cross_attention


def _core_recipes(old_names: set[str], before: Model, after: Model, index: int) -> dict[str, Recipe]:
    """Name within the mechanism -> recipe of the layer's new tensor."""
    old, new = before.layer_attention(index), after.layer_attention(index)
    wanted = _tensor_names(new, after, index)
    kept = old_names & wanted
    if old.feature_map != new.feature_map:
        kept = {name for name in kept if not name.startswith(_PROJECTION)}
    if old.mixture != new.mixture:
        kept = {name for name in kept if not name.startswith(_MIXTURE)}
    recipes = {name: Recipe((name,)) for name in kept}
    if not wanted & set(_POOLS) or (old.compression == new.compression and kept & {_BOTH, *_POOLS}):
        return recipes
    try:
        pools = _pool_recipes(old_names, old, new, after.kv_heads)
    except UserError as error:
        raise UserError(f"layer {index}: {error}") from None
    return recipes | {name: recipe for name, recipe in pools.items() if name in wanted}


def _tensor_names(config: Attention, model: Model, index: int) -> set[str]:
    """Names of a mechanism's parameters and buffers, which do not depend on the number of heads."""
    with torch.device("meta"):
        core = attention.build(
            config,
            num_heads=1,
            head_dim=model.head_size,
            causal=model.is_causal_layer(index),
            max_positions=model.max_positions or 1,
        )
    return set(core.state_dict())


def _pool_recipes(old_names: set[str], old: Attention, new: Attention, kv_heads: int) -> dict[str, Recipe]:
    """Recipes of FLuRKA's E and F; empty if the old layer does not determine them."""
    old_pool, new_pool = old.compression, new.compression
    if not isinstance(new_pool, BlockCompression):
        return {}
    if old_pool is None and old.similarity == "kernel":
        check_merge(new_pool.block_size, new_pool.rank)
        heads = kv_heads if new_pool.per_head else None
        tokens = pooling_logits(new_pool.block_size, new_pool.block_size)
        return dict.fromkeys(
            _POOLS, Recipe((), partial(_convert_pool, tokens, rank=new_pool.rank, heads=heads))
        )
    if not isinstance(old_pool, BlockCompression):
        return {}
    if old_pool.block_size != new_pool.block_size:
        raise _fixed_key_error("block_size", new_pool.block_size, old_pool.block_size)
    if old_pool.per_head and not new_pool.per_head:
        raise _fixed_key_error("per_head", False, True)
    if new_pool.share_kv and not old_pool.share_kv:
        raise _fixed_key_error("share_kv", True, False)
    check_merge(old_pool.rank, new_pool.rank)
    heads = kv_heads if new_pool.per_head and not old_pool.per_head else None
    recipes = {}
    for index, name in enumerate(_POOLS):
        source = next(x for x in (name, _POOLS[0], _BOTH) if x in old_names)
        part = index if source == _BOTH else None
        recipes[name] = Recipe((source,), partial(_convert_pool, part=part, rank=new_pool.rank, heads=heads))
    return recipes


def _fixed_key_error(key: str, new: Any, old: Any) -> UserError:
    return UserError(
        f"compression.{key}={new} was {old} in the weights that it starts from; leave it at {old}"
    )


def _convert_pool(logits: Tensor, *, part: int | None = None, rank: int, heads: int | None) -> Tensor:
    """E or F with `rank` landmarks, repeated for `heads`, from logits (..., r, b) or `part` of (..., 1 or 2, r, b)."""
    if part is not None:
        logits = logits.select(-3, min(part, logits.shape[-3] - 1))
    fewer = fewer_landmarks(logits, rank)
    return fewer.clone() if heads is None else fewer.repeat(heads, 1, 1)


UPDATE_TARGETS = {
    "self_attention.qkv": ("query", "key", "value"),
    "self_attention.output": ("output",),
    "mlp.linear_fc1": ("gate", "up"),
    "mlp.linear_fc2": ("down",),
}
"""A layer's matrix -> the targets of low-rank updates whose rows it has, in order."""


def update_name(layer: str, module: str, target: str) -> str:
    """Module name of a low-rank update of a layer's matrix."""
    return f"{layer}.{module.partition('.')[0]}.{target}_update"


def without_updates(source: WholeTensors, config: Config) -> WholeTensors:
    """A run's checkpoint with its low-rank updates folded; `source` itself if it has none."""
    lora = config.optimizer.updates
    return source if lora is None else fold_updates(source, config.model, lora)


def fold_updates(source: WholeTensors, model: Model, lora: Lora) -> DerivedTensors:
    """Fold low-rank updates into the weights: W + alpha / rank B A instead of W.

    In float32, because an update may be smaller than the rounding of a bfloat16 weight. model: the checkpoint's.
    """
    names = source.names
    recipes = {name: Recipe((name,)) for name in names if UPDATES.search(name) is None}
    for module, targets in UPDATE_TARGETS.items():
        for name in [name for name in recipes if name.partition(".")[2] == f"{module}.weight"]:
            updates = {target: update_name(name.partition(".")[0], module, target) for target in targets}
            updates = {target: update for target, update in updates.items() if f"{update}.up" in names}
            if updates:
                parts = [f"{update}.{part}" for update in updates.values() for part in ("up", "down")]
                add = partial(_add_updates, list(updates), model, module, lora.alpha / lora.rank)
                recipes[name] = Recipe((name, *parts), add, keeps_shape=True)
    return DerivedTensors(source, recipes)


def _add_updates(
    targets: list[str], model: Model, module: str, scale: float, weight: Tensor, *parts: Tensor
) -> Tensor:
    """A layer's matrix plus its updates, in float32. parts: B, then A, of each of `targets`."""
    whole = weight.detach().float().clone()
    rows = _target_rows(model, module, whole)
    factors = [part.detach().float() for part in parts]
    for target, up, down in zip(targets, factors[::2], factors[1::2]):
        rows[target] += scale * (up @ down).view(rows[target].shape)
    return whole


def _target_rows(model: Model, module: str, whole: Tensor) -> dict[str, Tensor]:
    """Target -> view of its rows of a matrix. Rows of the QKV projection are grouped by key head."""
    if module == "self_attention.qkv":
        heads = whole.view(model.kv_heads, -1, model.head_size, whole.shape[-1])
        queries = model.num_heads // model.kv_heads
        return {"query": heads[:, :queries], "key": heads[:, queries:-1], "value": heads[:, -1:]}
    if module == "mlp.linear_fc1" and model.is_mlp_gated:
        half = len(whole) // 2
        return {"gate": whole[:half], "up": whole[half:]}
    return {UPDATE_TARGETS[module][-1]: whole}


class Unrounded(DerivedTensors):
    """A run's checkpoint whose frozen weights are replaced with the unrounded ones that the run started from.

    DeepSpeed keeps float32 master weights only of trained parameters; the checkpoint has the others rounded to the
    model's dtype.
    """

    def __init__(self, checkpoint: WholeTensors, origin: Callable[[], WholeTensors]):
        """origin: finds the weights that the run started from, by the same names; raises UserError if they are gone."""
        super().__init__(checkpoint, {name: Recipe((name,)) for name in checkpoint.names})
        self._find_origin = origin

    def read(self, name: str, keys: Iterable[str] = STATE, fragment: Fragment = WHOLE) -> dict[str, Tensor]:
        """Return the available `keys` of a tensor."""
        state = super().read(name, keys, fragment)
        weight = state.get(WEIGHT)
        if weight is None or weight.dtype == torch.float32 or self._origin is None:
            return state
        if name not in self._origin.names or self._origin.shape(name) != self.shape(name):
            return state
        exact = self._origin.read(name, [WEIGHT], fragment)[WEIGHT]
        # The origin may have been replaced since. It is still the same if it rounds to the run's weights.
        if exact.to(weight.dtype).equal(weight):
            state[WEIGHT] = exact
        return state

    @cached_property
    def _origin(self) -> WholeTensors | None:
        try:
            return self._find_origin()
        except UserError:
            return None

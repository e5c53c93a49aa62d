"""From a feature map's options to the module that holds its projection."""

from megakernel.attention.heads import LayerSettings
from megakernel.attention.projection import Hedgehog, Projection, RandomMatrix
from megakernel.attention.spectral import FastFoodProjection, GaussianMixture, GenerativeProjection
from megakernel.config.errors import ConfigError
from megakernel.config.feature_map import FeatureMap


def build_projection(form: FeatureMap, settings: LayerSettings) -> Projection:
    """The projection of one layer, for the key heads of one shard.

    Everything random is a function of (seed, head, draw). Raises ValueError for options that do not fit head_dim.
    """
    kv_heads, head_dim, seed, heads = settings.kv_heads, settings.head_dim, settings.seed, settings.heads
    if problems := list(form.problems_at(head_dim)):
        raise ConfigError(problems)
    if form.name == "hedgehog":
        return Hedgehog(form, kv_heads, head_dim)
    if form.name in ("favor", "rff"):
        return RandomMatrix(form, kv_heads, head_dim, seed)
    if form.is_gmm:
        return GaussianMixture(form, kv_heads, head_dim, seed, heads)
    if form.is_fastfood:
        return FastFoodProjection(form, kv_heads, head_dim, seed)
    if form.is_generative:
        return GenerativeProjection(form, head_dim, seed, heads)
    return Projection(form, head_dim)

"""Frequencies from a learned spectral distribution: the three kinds of *Learning the Transformer Kernel*."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from megakernel.attention.generator import Generator
from megakernel.attention.heads import HeadShard, Seed, generator
from megakernel.attention.noise import Noise
from megakernel.attention.projection import Projection, drawn_per_head, gaussian
from megakernel.config.feature_map import FeatureMap
from megakernel.ops.projections import FastFood, padded_width

SHARED = "shared"
"""Stands for the head in the random numbers of what all heads of a layer share."""


class GaussianMixture(Projection):
    """omega = mu_c + S_c^T n of a learned mixture of C Gaussians, one noise n for all of them (KL eqs. 5 and 10).

    gmm_rks has full matrices S_c, covariance S_c^T S_c; tied, its two components are +-mu with one S. gmm_prf has
    standard deviations sigma_c in place of S_c. Initial values are KL's, whose laws count the key heads of the layer.
    """

    def __init__(self, form: FeatureMap, kv_heads: range, head_dim: int, seed: Seed, heads: HeadShard):
        super().__init__(form, head_dim)
        self.full = form.name == "gmm_rks"
        self.tied = form.is_tied
        samples, components = form.sample_count(head_dim), 1 if self.tied else form.components
        draw = drawn_per_head(kv_heads, seed, lambda stream: gaussian(samples, head_dim, stream))
        self.noise = Noise(draw, form.redraw_interval)

        total_heads = len(kv_heads) * heads.size
        shape: tuple[int, ...] = (components, head_dim)
        self.mean = _uniform(head_dim ** (-1 if self.full else -0.5), shape, kv_heads, seed, "mean")
        if self.full:
            bound = math.sqrt(6 / (head_dim * (head_dim + total_heads)))
            self.factor = _uniform(bound, (*shape, head_dim), kv_heads, seed, "factor")
        else:
            bound = math.sqrt(6 / (head_dim + total_heads))
            self.log_variance = _uniform(bound, shape, kv_heads, seed, "variance")

    def forward(self) -> Tensor:
        """omega, (H_kv, C M, d), one component after the other."""
        noise = self.noise()[:, None]
        mean = self.mean.to(noise.dtype)[:, :, None]
        if self.full:
            spread = noise @ self.factor.to(noise.dtype)
        else:
            spread = noise * torch.exp(self.log_variance.to(noise.dtype) / 2)[:, :, None]
        omega = torch.cat([spread + mean, spread - mean], 1) if self.tied else spread + mean
        return omega.flatten(1, 2)


class FastFoodProjection(Projection):
    """Blocks S H G Pi H B / sqrt(n) of each key head (KL eq. 6); the diagonals named in `learn` are parameters."""

    def __init__(self, form: FeatureMap, kv_heads: range, head_dim: int, seed: Seed):
        super().__init__(form, head_dim)
        blocks, size = form.sample_count(head_dim) // head_dim, padded_width(head_dim)
        learned = {"SGB": ("scales", "gaussians", "signs"), "S": ("scales",), "fixed": ()}[form.learn]
        for index, name in enumerate(FastFood._fields):
            fixed = Noise(drawn_per_head(kv_heads, seed, partial(fast_food_part, index, blocks, size)))
            setattr(self, name, nn.Parameter(fixed.values) if name in learned else fixed)

    def forward(self) -> FastFood:
        """The diagonals and the permutation, (H_kv, blocks, n) each."""
        parts = (getattr(self, name) for name in FastFood._fields)
        return FastFood(*(part() if isinstance(part, Noise) else part for part in parts))


class GenerativeProjection(Projection):
    """omega = g(n), g and the noise n shared by the heads of a layer (KL eq. 7)."""

    def __init__(self, form: FeatureMap, head_dim: int, seed: Seed, heads: HeadShard):
        super().__init__(form, head_dim)
        self.heads = heads
        samples = form.sample_count(head_dim)
        self.noise = Noise(
            lambda number: gaussian(samples, head_dim, generator(seed, SHARED, number)), form.redraw_interval
        )
        self.generator = Generator([head_dim] * 6, generator(seed, SHARED, "generator"))

    def sharded_parameters(self) -> dict[str, int]:
        """None: all shards of heads hold the whole generator."""
        return {}

    def redraw(self, step: int) -> None:
        """A step begins; the noise hears of it by itself."""
        self.generator.begin_step()

    def forward(self) -> Tensor:
        """omega, (M, d)."""
        # The generator is the same computation on every shard, so that summing the gradient of its result is enough.
        return self.heads.shared(self.generator(self.noise()))


def fast_food_part(index: int, blocks: int, size: int, stream: torch.Generator) -> Tensor:
    """One field (blocks, n) of a random FastFood: B signs, G normal, S for rows as long as Gaussian vectors."""
    signs = gaussian(blocks, size, stream).sign()
    gaussians = gaussian(blocks, size, stream)
    lengths = gaussian(blocks * size, size, stream).norm(dim=1).view(blocks, size)
    permutation = gaussian(blocks, size, stream).argsort(-1)
    return FastFood(lengths / gaussians.norm(dim=1, keepdim=True), gaussians, signs, permutation)[index]


def _uniform(bound: float, shape: tuple[int, ...], kv_heads: range, seed: Seed, name: str) -> nn.Parameter:
    """(H_kv, *shape), uniform within `bound` of 0."""
    draws = [torch.rand(shape, generator=generator(seed, head, name), device="cpu") for head in kv_heads]
    return nn.Parameter(((2 * torch.stack(draws) - 1) * bound).to(torch.get_default_device()))

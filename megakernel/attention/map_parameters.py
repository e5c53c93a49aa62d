"""Parameters and random numbers of a layer's feature map: W of hedgehog, frequencies omega, or none.

The learned frequencies are the three kinds of *Learning the Transformer Kernel* (KL).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakernel.attention.heads import LayerSettings, generator
from megakernel.attention.layer import FullPrecision
from megakernel.attention.noise import Noise
from megakernel.config.errors import ConfigError
from megakernel.config.feature_map import FeatureMap
from megakernel.ops import feature_maps as ops
from megakernel.ops.projections import FastFood, padded_width
from megakernel.ops.projections import Projection as OpProjection

Draw = Callable[[torch.Generator], Tensor]
"""Draws the random numbers of one head from its generator."""


class Projection(FullPrecision):
    """Returns the projection of the op's feature map when called; this base class is for maps without one."""

    def __init__(self, config: FeatureMap, settings: LayerSettings):
        super().__init__()
        self.heads = settings.heads
        self.feature_map = op_map(config)
        """The map's name and options for the op."""

    def sharded_parameters(self) -> dict[str, int]:
        """Name -> dimension that counts heads: all parameters and buffers."""
        return dict.fromkeys(self.state_dict(), 0)

    def forward(self) -> OpProjection | None:
        """One matrix per key head, (H_kv, M, d), one for all, (M, d), or a `FastFood`."""
        return None


class Hedgehog(Projection):
    """A learned W per key head, initialized as the identity."""

    def __init__(self, config: FeatureMap, settings: LayerSettings):
        super().__init__(config, settings)
        self.matrix = nn.Parameter(torch.eye(settings.head_dim).repeat(len(settings.kv_heads), 1, 1))

    def forward(self) -> Tensor:
        """W, (H_kv, d, d)."""
        # A copy: ZeRO 3 re-partitions a parameter as soon as the forward of its module has returned.
        return self.heads.of_key_head(self.matrix).clone()


class RandomMatrix(Projection):
    """A Gaussian omega that is not learned: orthogonal rows for favor, independent rows for rff."""

    def __init__(self, config: FeatureMap, settings: LayerSettings):
        super().__init__(config, settings)
        rows = orthogonal_gaussian if config.name == "favor" else gaussian
        samples = config.sample_count(settings.head_dim)
        draw = draw_per_head(settings, lambda stream: rows(samples, settings.head_dim, stream))
        self.matrix = Noise(draw, config.redraw_interval)

    def forward(self) -> Tensor:
        """omega, (H_kv, M, d)."""
        return self.matrix()


def op_map(config: FeatureMap) -> ops.Map:
    """The op's feature map; the op does not depend on where omega comes from."""
    name: str = "rks" if config.name == "rff" else config.name
    if name.endswith(("_rks", "_prf")):
        name = name[-3:]
    return ops.Map(name, config.components if config.kind == "gmm" else 1, config.smoothing)


def draw_per_head(settings: LayerSettings, draw: Draw) -> Callable[[int], Tensor]:
    """A function from a draw's number to (H_kv, ...), with one generator per head."""

    def draw_number(number: int) -> Tensor:
        # Draw 0, the only one of a map without redraws, has the head's seed without a number.
        suffix = (number,) if number else ()
        return torch.stack([draw(generator(settings.seed, head, *suffix)) for head in settings.kv_heads])

    return draw_number


def gaussian(samples: int, width: int, stream: torch.Generator) -> Tensor:
    """(samples, width) independent standard normal numbers, float64."""
    return torch.randn(samples, width, generator=stream, dtype=torch.float64, device="cpu")


def orthogonal_gaussian(samples: int, width: int, stream: torch.Generator) -> Tensor:
    """(samples, width) float64: rows with the norms of Gaussian vectors, orthogonal within each `width` rows."""
    blocks = []
    for _ in range(-(-samples // width)):
        directions, upper = torch.linalg.qr(gaussian(width, width, stream))
        # The signs make the directions uniform over all rotations.
        blocks.append((directions * upper.diagonal().sign()).T)
    lengths = gaussian(samples, width, stream).norm(dim=1)
    return torch.cat(blocks)[:samples] * lengths[:, None]


SLOPE = 0.01
"""Slope of LeakyReLU below 0."""

EPS = 1e-5
"""Added to the variance over samples."""

MOMENTUM = 0.1
"""Weight of a step's statistics in the running ones."""


class FrequencyGenerator(nn.Module):
    """Hidden layers, then a linear map and tanh: (M, widths[0]) noise to (M, widths[-1]) frequencies in (-1, 1)."""

    def __init__(self, widths: Sequence[int], stream: torch.Generator):
        super().__init__()
        self.hidden = nn.ModuleList(
            HiddenLayer(inner, outer, stream) for inner, outer in pairwise(widths[:-1])
        )
        self.weight, self.bias = linear_parameters(widths[-2], widths[-1], stream)

    def begin_step(self) -> None:
        """Commit the running statistics of the previous step."""
        for layer in self.hidden:
            assert isinstance(layer, HiddenLayer)
            layer.begin_step()

    def forward(self, noise: Tensor) -> Tensor:
        """Frequencies in the dtype of the noise."""
        for layer in self.hidden:
            noise = layer(noise)
        return torch.tanh(F.linear(noise, self.weight.to(noise.dtype), self.bias.to(noise.dtype)))


class HiddenLayer(FullPrecision):
    """Linear, batch norm over the samples, LeakyReLU.

    Training normalizes by batch statistics, evaluation by running ones. Each forward of a step updates the running
    statistics from their values at `begin_step`: micro-batches and recomputations see the same samples and must not
    be counted twice.
    """

    mean: Tensor
    variance: Tensor
    mean_before: Tensor
    variance_before: Tensor

    def __init__(self, inner: int, outer: int, stream: torch.Generator):
        super().__init__()
        self.weight, self.bias = linear_parameters(inner, outer, stream)
        self.scale, self.shift = nn.Parameter(torch.ones(outer)), nn.Parameter(torch.zeros(outer))
        self.register_buffer("mean", torch.zeros(outer))
        self.register_buffer("variance", torch.ones(outer))
        self.register_buffer("mean_before", torch.zeros(outer), persistent=False)
        self.register_buffer("variance_before", torch.ones(outer), persistent=False)

    def begin_step(self) -> None:
        """Save the running statistics as the base of this step's update."""
        self.mean_before.copy_(self.mean)
        self.variance_before.copy_(self.variance)

    def forward(self, x: Tensor) -> Tensor:
        """(M, inner) to (M, outer)."""
        weight, bias, scale, shift = (p.to(x.dtype) for p in (self.weight, self.bias, self.scale, self.shift))
        y = F.linear(x, weight, bias)
        if self.training:
            variance, mean = torch.var_mean(y, 0, correction=0)
            self._record(mean.detach(), variance.detach(), len(y))
        else:
            mean, variance = self.mean.to(x.dtype), self.variance.to(x.dtype)
        return F.leaky_relu((y - mean) * torch.rsqrt(variance + EPS) * scale + shift, SLOPE)

    @torch.no_grad()
    def _record(self, mean: Tensor, variance: Tensor, samples: int) -> None:
        unbiased = variance * (samples / max(samples - 1, 1))
        self.mean.copy_(torch.lerp(self.mean_before, mean.to(self.mean.dtype), MOMENTUM))
        self.variance.copy_(torch.lerp(self.variance_before, unbiased.to(self.variance.dtype), MOMENTUM))


def linear_parameters(inner: int, outer: int, stream: torch.Generator) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight (outer, inner) and bias (outer,), uniform in +-1 / sqrt(inner)."""
    uniform = torch.rand(outer, inner + 1, generator=stream, device="cpu") * 2 - 1
    weight, bias = (uniform * inner**-0.5).to(torch.get_default_device()).split([inner, 1], 1)
    return nn.Parameter(weight.contiguous()), nn.Parameter(bias[:, 0].contiguous())


SHARED = "shared"
"""Takes the place of the head in the seed of random numbers that all heads share."""


class GaussianMixture(Projection):
    """omega = mu_c + S_c^T n of a learned mixture of C Gaussians that share one noise n (KL eqs. 5 and 10).

    gmm_rks has full matrices S_c, covariance S_c^T S_c; if tied, its two components are +-mu with one S. gmm_prf has
    standard deviations sigma_c in place of S_c. Initial values are KL's, whose bounds depend on the layer's key heads.
    """

    def __init__(self, config: FeatureMap, settings: LayerSettings):
        super().__init__(config, settings)
        head_dim, total_heads = settings.head_dim, settings.num_kv_heads
        self.full = config.name == "gmm_rks"
        self.tied = config.is_tied
        samples, components = config.sample_count(head_dim), 1 if self.tied else config.components
        draw = draw_per_head(settings, lambda stream: gaussian(samples, head_dim, stream))
        self.noise = Noise(draw, config.redraw_interval)

        shape: tuple[int, ...] = (components, head_dim)
        self.mean = _uniform(head_dim ** (-1 if self.full else -0.5), shape, settings, "mean")
        if self.full:
            bound = math.sqrt(6 / (head_dim * (head_dim + total_heads)))
            self.factor = _uniform(bound, (*shape, head_dim), settings, "factor")
        else:
            bound = math.sqrt(6 / (head_dim + total_heads))
            self.log_variance = _uniform(bound, shape, settings, "variance")

    def forward(self) -> Tensor:
        """omega, (H_kv, C M, d), components concatenated."""
        noise = self.noise()[:, None]
        own = self.heads.of_key_head
        mean = own(self.mean).to(noise.dtype)[:, :, None]
        if self.full:
            spread = noise @ own(self.factor).to(noise.dtype)
        else:
            spread = noise * torch.exp(own(self.log_variance).to(noise.dtype) / 2)[:, :, None]
        omega = torch.cat([spread + mean, spread - mean], 1) if self.tied else spread + mean
        return omega.flatten(1, 2)


class FastFoodProjection(Projection):
    """Blocks S H G Pi H B / sqrt(n) per key head (KL eq. 6); the diagonals named in `learn` are parameters."""

    def __init__(self, config: FeatureMap, settings: LayerSettings):
        super().__init__(config, settings)
        head_dim = settings.head_dim
        blocks, size = config.sample_count(head_dim) // head_dim, padded_width(head_dim)
        learned = {"SGB": ("scales", "gaussians", "signs"), "S": ("scales",), "fixed": ()}[config.learn]
        for index, name in enumerate(FastFood._fields):
            fixed = Noise(draw_per_head(settings, partial(draw_fastfood_field, index, blocks, size)))
            setattr(self, name, nn.Parameter(fixed.values) if name in learned else fixed)

    def forward(self) -> FastFood:
        """The diagonals and the permutation, (H_kv, blocks, n) each."""
        parts = (getattr(self, name) for name in FastFood._fields)
        own = self.heads.of_key_head
        return FastFood(*(part() if isinstance(part, Noise) else own(part) for part in parts))


class GenerativeProjection(Projection):
    """omega = g(n); the heads of a layer share g and the noise n (KL eq. 7)."""

    def __init__(self, config: FeatureMap, settings: LayerSettings):
        super().__init__(config, settings)
        seed, head_dim = settings.seed, settings.head_dim
        samples = config.sample_count(head_dim)
        self.noise = Noise(
            lambda number: gaussian(samples, head_dim, generator(seed, SHARED, number)),
            config.redraw_interval,
        )
        self.generator = FrequencyGenerator([head_dim] * 6, generator(seed, SHARED, "generator"))

    def sharded_parameters(self) -> dict[str, int]:
        """None: every tensor-parallel rank holds the whole generator."""
        return {}

    def redraw(self, step: int) -> None:
        """Begin a step; the noise redraws itself."""
        self.generator.begin_step()

    def forward(self) -> Tensor:
        """omega, (M, d)."""
        # Every shard runs the same generator, so summing the gradient of its result is enough.
        return self.heads.shared(self.generator(self.noise()))


def draw_fastfood_field(index: int, blocks: int, size: int, stream: torch.Generator) -> Tensor:
    """One field (blocks, n) of a random FastFood: B signs, G normal, S for rows as long as Gaussian vectors."""
    signs = gaussian(blocks, size, stream).sign()
    gaussians = gaussian(blocks, size, stream)
    lengths = gaussian(blocks * size, size, stream).norm(dim=1).view(blocks, size)
    permutation = gaussian(blocks, size, stream).argsort(-1)
    return FastFood(lengths / gaussians.norm(dim=1, keepdim=True), gaussians, signs, permutation)[index]


def _uniform(bound: float, shape: tuple[int, ...], settings: LayerSettings, name: str) -> nn.Parameter:
    """(H_kv, *shape), uniform in +-bound."""
    streams = [generator(settings.seed, head, name) for head in settings.kv_heads]
    draws = torch.stack([torch.rand(shape, generator=stream, device="cpu") for stream in streams])
    return nn.Parameter(((2 * draws - 1) * bound).to(torch.get_default_device()))


_KINDS: dict[str, type[Projection]] = {
    "hedgehog": Hedgehog,
    "favor": RandomMatrix,
    "rff": RandomMatrix,
    "gmm": GaussianMixture,
    "fastfood": FastFoodProjection,
    "generative": GenerativeProjection,
}
"""Prefix of a map's name -> projection; other maps have none."""


def build_projection(config: FeatureMap, settings: LayerSettings) -> Projection:
    """The projection of one layer for the key heads of one shard.

    Random numbers are a function of (seed, head, draw). Raises ValueError for options that do not fit head_dim.
    """
    if problems := list(config.problems_at(settings.head_dim)):
        raise ConfigError(problems)
    return _KINDS.get(config.name.partition("_")[0], Projection)(config, settings)

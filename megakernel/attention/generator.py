"""The network of KL's generative kernels, which makes samples of a spectral distribution from noise (KL eq. 7)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakernel.attention.precision import FullPrecision

SLOPE = 0.01
"""Of LeakyReLU below 0."""

EPS = 1e-5
"""Added to the variance over samples."""

MOMENTUM = 0.1
"""Share of a step's statistics in the running ones."""


class Generator(nn.Module):
    """Hidden layers, then a linear map and tanh: (M, widths[0]) noise to (M, widths[-1]) frequencies in (-1, 1)."""

    def __init__(self, widths: Sequence[int], draw: torch.Generator):
        super().__init__()
        self.hidden = nn.ModuleList(HiddenLayer(inner, outer, draw) for inner, outer in pairwise(widths[:-1]))
        self.weight, self.bias = linear_parameters(widths[-2], widths[-1], draw)

    def begin_step(self) -> None:
        """Settle the running statistics of the step before."""
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

    Training normalizes by the samples' own statistics, evaluation by running ones. These move once per training step,
    from where `begin_step` found them: a step's micro-batches and recomputations see the same samples, and must not
    count twice.
    """

    mean: Tensor
    variance: Tensor
    mean_before: Tensor
    variance_before: Tensor

    def __init__(self, inner: int, outer: int, draw: torch.Generator):
        super().__init__()
        self.weight, self.bias = linear_parameters(inner, outer, draw)
        self.scale, self.shift = nn.Parameter(torch.ones(outer)), nn.Parameter(torch.zeros(outer))
        self.register_buffer("mean", torch.zeros(outer))
        self.register_buffer("variance", torch.ones(outer))
        self.register_buffer("mean_before", torch.zeros(outer), persistent=False)
        self.register_buffer("variance_before", torch.ones(outer), persistent=False)

    def begin_step(self) -> None:
        """Take the running statistics for those that this step moves."""
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


def linear_parameters(inner: int, outer: int, draw: torch.Generator) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight (outer, inner) and bias (outer,), uniform within 1 / sqrt(inner) of 0."""
    uniform = torch.rand(outer, inner + 1, generator=draw, device="cpu") * 2 - 1
    weight, bias = (uniform * inner**-0.5).to(torch.get_default_device()).split([inner, 1], 1)
    return nn.Parameter(weight.contiguous()), nn.Parameter(bias[:, 0].contiguous())

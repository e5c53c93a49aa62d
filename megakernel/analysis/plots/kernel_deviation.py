"""How much kernel estimates scatter over draws of the noise: KL's relative standard deviation (section 4.1), per head.

The paper takes it of the model's output only, which `voting` does too; here it is of phi(q).phi(k) itself.
"""

import torch
from torch import Tensor

from megakernel.attention.flurka import FlurkaAttention
from megakernel.attention.kernel import KernelAttention
from megakernel.evaluation.voting import has_noise, mean_over_draws
from megakernel.ops.phi import features
from megakernel.uptraining.query_rows import sample_queries

from .subject import CapturedAttention, Subject
from .table import Row

TOKENS = 64
"""Queries, and keys, of a row whose pairs are looked at."""


def measure(subject: Subject) -> list[Row]:
    """layer, head, sample, deviation: the median over pairs of a query and a key, of std / |mean| over the draws."""
    return [
        {"layer": layer, "head": head, "sample": sample, "deviation": of_pairs.median().item()}
        for sample, layer, captured in subject.captured()
        if estimates_kernels(captured)
        for head, of_pairs in enumerate(deviations(captured, subject.draws).flatten(1))
    ]


def estimates_kernels(captured: CapturedAttention) -> bool:
    """Whether the layer compares queries and keys of tokens by features of noise that training redraws."""
    compares = isinstance(captured.core, (KernelAttention, FlurkaAttention))
    return compares and captured.core.keys_per_head == 1 and has_noise(captured.core)


@torch.no_grad()
def deviations(captured: CapturedAttention, draws: int) -> Tensor:
    """std / |mean| of phi(q).phi(k) over draws, for pairs of a sample of tokens of the first row: (H, T, T) float64.

    Rotated where the layer compares them rotated: kernel attention does, FLuRKA's landmarks are not.
    """
    core, inputs = captured.core, captured.inputs
    assert isinstance(core, (KernelAttention, FlurkaAttention))
    q, k = inputs.q[:1].double(), inputs.k[:1].double()
    if isinstance(core, KernelAttention):
        q, k = inputs.turned(q, k)
    chosen = sample_queries(inputs.length, TOKENS, seed=0, step=0).to(q.device)
    # Query heads of one key head in the place of chunks.
    queries = q[:, :, chosen].unflatten(1, (k.shape[1], -1))
    keys = k[:, :, None, chosen]

    def moments() -> Tensor:
        phi_q, phi_k = (
            phi.values if phi.log_scale is None else phi.values * phi.log_scale.exp()[..., None]
            for phi in (features(core.projection.feature_map, x, core.projection()) for x in (queries, keys))
        )
        estimates = (phi_q @ phi_k.transpose(-1, -2)).flatten(1, 2)[0]
        return torch.stack([estimates, estimates.square()])

    mean, square = mean_over_draws(core, moments, draws)
    return (square - mean.square()).clamp(min=0).sqrt() / mean.abs()

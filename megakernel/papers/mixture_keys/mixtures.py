"""Mixture keys: their coefficients, and the likelihood of queries.

`mixing`: coefficients pi per layer and head (Transformer-MGK, table 8). `query_likelihood`: the density of queries
under the Gaussians around keys by which the paper interprets attention (its eqs. 3 and 5),

    p(q_i) = 1/J sum_j sum_r pi_r N(q_i; k_jr, sigma_r^2 I)

over the J keys that the query sees, with sigma^2 = sqrt(d) by default and pi scaled to sum to 1. A layer with one key
per position is the paper's baseline. The paper does not give the unit of its 0.18; here it is nats per dimension of the
query, -log p / d.
"""

import math

import torch
from torch import Tensor

from megakernel.analysis.plots.subject import CapturedAttention, Subject
from megakernel.analysis.plots.table import Row
from megakernel.attention.mixture import KeyMixture, keys_and_priors
from megakernel.attention.softmax import SoftmaxAttention
from megakernel.model.layer import attention_cores
from megakernel.papers.mixture_keys.pairwise import PairwiseAttention
from megakernel.uptraining.sampled_queries import SampledQueries


def measure_mixing(subject: Subject) -> list[Row]:
    """layer, head, key, pi."""
    return [
        {"layer": layer, "head": head, "key": key, "pi": value}
        for layer, core in attention_cores(subject.model).items()
        for mixture in core.modules()
        if isinstance(mixture, KeyMixture) and mixture.soft
        for head, of_head in enumerate(mixture.priors().tolist())
        for key, value in enumerate(of_head)
    ]


def measure_query_likelihood(subject: Subject) -> list[Row]:
    """layer, head, sample, nll (mean over the queries of a sequence)."""
    return [
        {"layer": layer, "head": head, "sample": sample, "nll": value}
        for sample, layer, captured in subject.captured()
        if isinstance(captured.core, (PairwiseAttention, SoftmaxAttention))
        for head, value in enumerate(negative_log_likelihood(captured).tolist())
    ]


@torch.no_grad()
def negative_log_likelihood(captured: CapturedAttention) -> Tensor:
    """-log p(q_i) / d, averaged over the queries of the first sequence: (H,) float64."""
    core, inputs = captured.core, captured.inputs
    k, priors = keys_and_priors(getattr(core, "mixture", None), inputs.k[:1].double())
    q, k = inputs.rotated_by_place(inputs.q[:1].double(), k)
    keys = (k if k.dim() == 5 else k[:, :, None])[0].repeat_interleave(q.shape[1] // k.shape[1], 0)
    width, count = q.shape[-1], keys.shape[1]
    priors = q.new_ones(1, count) if priors is None else priors
    shares = (priors / priors.sum(-1, keepdim=True)).to(q.dtype)
    shares = shares.repeat_interleave(len(keys) // len(priors), 0)
    mixture = getattr(core, "mixture", None)
    precisions = None if mixture is None else mixture.precisions()
    if precisions is None:
        scales = q.new_tensor(getattr(core, "variances", None) or [1.0] * count).expand(len(keys), count)
    else:
        scales = (1 / precisions).to(q).repeat_interleave(len(keys) // len(precisions), 0)
    variances = scales * width**0.5
    every = torch.arange(inputs.length, device=q.device)
    seen = SampledQueries.of(inputs, every, core.causal).visible[0]
    return torch.stack(
        [
            density(q[0, head], keys[head], shares[head].log(), variances[head], seen).neg().mean() / width
            for head in range(len(keys))
        ]
    )


def density(q: Tensor, keys: Tensor, log_shares: Tensor, variances: Tensor, seen: Tensor) -> Tensor:
    """log p(q_i) (N,) of queries (N, d), given keys (M, N, d), log_shares (M,), variances (M,) and seen (N, N) bool."""
    squares = torch.cdist(q.expand_as(keys), keys).square()
    normal = -squares / (2 * variances[:, None, None])
    normal = normal - q.shape[-1] / 2 * (2 * math.pi * variances).log()[:, None, None]
    logs = (normal + log_shares[:, None, None]).logsumexp(0)
    return logs.masked_fill(~seen, -torch.inf).logsumexp(-1) - seen.sum(-1).log()

"""Learned variances of mixture keys (Transformer-MGK, section 3.4) against the formula in plain loops."""

import pytest
import torch

from megakernel import attention
from megakernel.attention import AttentionInputs

B, HEADS, KV, KEYS, N, D = 2, 4, 2, 3, 11, 5


def layer(causal, **mixture):
    tree = {"preset": "mgk", "mixture": {"keys": KEYS, **mixture}}
    built = attention.build(tree, num_heads=HEADS, num_kv_heads=KV, head_dim=D, causal=causal, rotary=False)
    return built.double()


def inputs(seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = ((B, HEADS, N, D), (B, KV, KEYS, N, D), (B, KV, N, D))
    return [torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in shapes]


def by_formula(q, k, v, sigma2, priors, causal):
    """(6.1) for one query after the other."""
    out = []
    for batch in range(B):
        for head in range(HEADS):
            of = head // (HEADS // KV)
            for token in range(N):
                last = token + 1 if causal else N
                squares = (q[batch, head, token] - k[batch, of, :, :last]).square().sum(-1)
                weights = (priors[of, :, None] * (-squares / (2 * sigma2[of, :, None])).exp()).sum(0)
                out.append(weights @ v[batch, of, :last] / weights.sum())
    return torch.stack(out).view(B, HEADS, N, D)


@pytest.mark.parametrize("causal", [True, False])
def test_outputs_and_gradients_are_those_of_the_formula(causal):
    built = layer(causal, sigma2="learned")
    with torch.no_grad():
        built.mixture.log_sigma2.copy_(torch.linspace(-1.0, 1.5, KV * KEYS).view(KV, KEYS))
        built.mixture.weights.copy_(torch.linspace(0.1, 0.9, KV * KEYS).view(KV, KEYS))
    leaves = [*inputs(), built.mixture.log_sigma2, built.mixture.weights]
    found = built(*leaves[:3], AttentionInputs())
    *tensors, logs, priors = leaves
    expected = by_formula(*tensors, logs.exp() * D**0.5, priors, causal)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pairs = zip(
        torch.autograd.grad(found, leaves, direction), torch.autograd.grad(expected, leaves, direction)
    )
    for ours, exact in pairs:
        assert exact.abs().max() > 1e-3
        torch.testing.assert_close(ours, exact, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("estep", ["soft", "hard"])
def test_they_begin_as_variances_of_one(estep):
    learned, fixed = (layer(True, estep=estep, sigma2=sigma2) for sigma2 in ("learned", None))
    tensors = inputs()
    found = learned(*tensors, AttentionInputs())
    torch.testing.assert_close(found, fixed(*tensors, AttentionInputs()), atol=1e-12, rtol=1e-12)
    assert learned.sharded_parameters()["mixture.log_sigma2"] == 0


def test_decoding_keeps_two_more_numbers_for_each_key():
    built = layer(True, sigma2="learned")
    with torch.no_grad():
        built.mixture.log_sigma2.uniform_(-1, 1)
    tensors = [x.detach() for x in inputs()]
    whole = built(*tensors, AttentionInputs())
    state, parts = None, []
    for token in range(N):
        part, state = built.extend(*(x[..., token : token + 1, :] for x in tensors), state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 2), whole, atol=1e-10, rtol=1e-10)
    cached = sum(x.numel() for x in state.inner if isinstance(x, torch.Tensor)) // B
    assert cached == N * KV * (KEYS * (D + 2) + D) == N * built.state_sizes[1]

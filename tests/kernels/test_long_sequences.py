"""Kernels on a GPU: sequences of up to a million tokens, large inputs, deterministic results, no memory leaks."""

import pytest
import torch
from torch import Tensor

from megakernel.ops.kernel_attention import kernel_attention
from tests.kernels.comparing import TOLERANCE, random, rms_ratio

pytestmark = pytest.mark.gpu

WIDTH = 64


def leaves(length: int, scale: float = 1.0) -> list[Tensor]:
    shape = (1, 2, length, WIDTH)
    return [(scale * random(*shape, seed=seed)).bfloat16().requires_grad_() for seed in range(3)]


def attention(inputs: list[Tensor], feature_map: str, backend: str | None = None) -> list[Tensor]:
    """The output, and the gradients of a random weighted sum of it."""
    projection = None if feature_map == "elu" else 0.5 * random(WIDTH, WIDTH, seed=3)
    q, k, v = inputs
    out = kernel_attention(q, k, v, feature_map=feature_map, projection=projection, backend=backend)
    pull = random(*out.shape, seed=4).to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, pull)]


@pytest.mark.parametrize("feature_map", ["elu", "hedgehog", "favor"])
@pytest.mark.parametrize("length", [65536, 262144, 1048576])
def test_long_sequences_agree_with_chunks_in_float32(feature_map, length):
    inputs = leaves(length)
    fast = attention(inputs, feature_map)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    for ours, theirs in zip(fast, attention(wide, feature_map, "chunked")):
        assert rms_ratio(ours, theirs) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("feature_map", ["elu", "hedgehog", "favor"])
def test_inputs_of_scale_10_agree(feature_map):
    inputs = leaves(65536, scale=10.0)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    ours, theirs = attention(inputs, feature_map)[0], attention(wide, feature_map, "chunked")[0]
    assert ours.isfinite().all()
    assert rms_ratio(ours, theirs) <= 2e-2


def test_two_runs_are_bit_identical_and_leave_no_memory():
    inputs = leaves(262144)
    first = attention(inputs, "hedgehog")
    held = torch.cuda.memory_allocated()
    for _ in range(3):
        again = attention(inputs, "hedgehog")
        assert all(torch.equal(a, b) for a, b in zip(first, again))
        del again
        assert torch.cuda.memory_allocated() == held

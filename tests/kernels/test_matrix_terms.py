"""A projection in bfloat16, as trained weights are, is one term of the kernels' products; one in float32 is two."""

from functools import partial

import pytest
import torch

from megakernel.ops.flurka_attention import flurka_attention
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.kernels.arguments import Matrix
from megakernel.ops.kernels.launch import record_launches
from tests.kernels.comparing import DEVICE, random

WIDTH, LENGTH = 16, 20


def kernel(q, k, v, projection):
    return kernel_attention(q, k, v, feature_map="hedgehog", projection=projection, backend="triton")


def flurka(q, k, v, projection, near):
    pool = torch.eye(8, device=DEVICE)[:2]
    options = {"feature_map": "hedgehog", "projection": projection, "near": near, "return_state": False}
    gate = torch.zeros(2, 1, device=DEVICE) if near == "softmax" else None
    return flurka_attention(
        q, k, v, pool_keys=pool, pool_values=pool, gate=gate, **options, backend="triton"
    )[0]


CALLS = {"kernel attention": kernel} | {
    f"FLuRKA, {near} window": partial(flurka, near=near) for near in ("softmax", "kernel")
}


def run(call, projection):
    """The output, and gradients of q, k, v and the projection."""
    leaves = [
        random(1, 2, LENGTH, WIDTH, seed=seed, dtype=torch.bfloat16).requires_grad_() for seed in range(3)
    ]
    leaves.append(projection.requires_grad_())
    out = call(*leaves)
    return [out, *torch.autograd.grad(out, leaves, random(*out.shape, seed=5, dtype=torch.bfloat16))]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_one_term_gives_the_bits_of_two(call):
    """The second term of numbers that bfloat16 holds is 0."""
    projection = random(2, WIDTH, WIDTH, seed=3, dtype=torch.bfloat16)
    one, two = (run(call, x) for x in (projection, projection.float()))
    for found, expected in zip(one, two, strict=True):
        assert torch.equal(found, expected.to(found.dtype))
        assert found.any()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_kernels_get_as_many_terms_as_the_dtype_needs(call):
    for dtype, terms in ((torch.bfloat16, 1), (torch.float32, 2)):
        with record_launches() as launches:
            run(call, torch.empty(2, WIDTH, WIDTH, dtype=dtype, device=DEVICE))
        split = [
            x
            for launch in launches
            for x in launch.arguments
            if isinstance(x, Matrix) and x.terms.dtype == torch.bfloat16
        ]
        assert split
        for matrix in split:
            assert len(matrix.terms) == terms
            assert (matrix.low is None) == (terms == 1)

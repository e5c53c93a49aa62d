"""FLuRKA's kernels give the same results under torch.compile and activation checkpointing."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megakernel.attention import Rotary
from megakernel.ops import flurka_attention
from tests.kernels.comparing import DEVICE
from tests.kernels.test_flurka_attention import tokens

Attend = Callable[..., Tensor]


def compiled(attend: Attend) -> Attend:
    # All of torch.compile but its last step, which would need a C++ compiler.
    return torch.compile(attend, backend="aot_eager", fullgraph=True)


def recomputed_by_megatron(attend: Attend) -> Attend:
    from megatron.core.tensor_parallel.random import checkpoint

    return partial(checkpoint, attend, False)


@pytest.fixture
def no_random_state_of_a_gpu(monkeypatch):
    """Replaces the GPU RNG state that Megatron restores before recomputation, on machines without a GPU."""
    from megatron.core.tensor_parallel import random

    if DEVICE == "cpu":
        monkeypatch.setattr(random, "_get_cuda_rng_state", lambda *_, **__: None)
        monkeypatch.setattr(random, "_set_cuda_rng_state", lambda *_, **__: None)


WRAPPED: dict[str, Callable[[Attend], Attend]] = {
    "compiled": compiled,
    "recomputed": lambda attend: partial(checkpoint, attend, use_reentrant=False),
    "recomputed, inputs kept by autograd": lambda attend: partial(checkpoint, attend, use_reentrant=True),
    "recomputed by Megatron": recomputed_by_megatron,
}
"""Name -> a wrapper of a layer's attention."""

VARIANTS = {"gated": "softmax", "kernel": "kernel"}
"""Variant of `tokens` -> `near`."""


@pytest.fixture(scope="module", params=VARIANTS)
def plain(request) -> tuple[Attend, list[Tensor], Tensor]:
    """Attention of each variant, its inputs with gradients, and its output."""
    leaves = tokens(torch.Generator().manual_seed(0), torch.device(DEVICE), variant=request.param, length=20)
    names, inputs = list(leaves), [x.requires_grad_() for x in leaves.values()]
    options = {"near": VARIANTS[request.param], "rotary": Rotary(12), "backend": "triton"}

    def attend(*given: Tensor) -> Tensor:
        named = dict(zip(names, given))
        return flurka_attention(2 * named.pop("q"), feature_map="hedgehog", **named, **options)[0]

    out = attend(*inputs)
    out.square().sum().backward()
    return attend, inputs, out.detach()


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.usefixtures("no_random_state_of_a_gpu")
def test_a_wrapped_layer_gives_the_same_outputs_and_gradients(wrap, plain):
    attend, inputs, out = plain
    again = [x.detach().clone().requires_grad_() for x in inputs]
    found = WRAPPED[wrap](attend)(*again)
    found.square().sum().backward()
    assert torch.equal(found, out)
    for expected, given in zip(inputs, again):
        assert expected.grad.any()
        assert torch.equal(given.grad, expected.grad)

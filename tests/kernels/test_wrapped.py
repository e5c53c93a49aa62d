"""Kernels give the same results under torch.compile and activation checkpointing."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megakernel.attention import Rotary
from megakernel.ops.flurka_attention import flurka_attention
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.weighted_attention import weighted_attention
from tests.kernels.comparing import DEVICE
from tests.kernels.test_exchange import Chain
from tests.kernels.test_flurka_attention import tokens as flurka_tokens
from tests.kernels.test_kernel_attention import tokens as kernel_tokens
from tests.kernels.test_weighted_attention import tokens as weighted_tokens

pytestmark = pytest.mark.second

Attend = Callable[..., Tensor]


def compiled(attend: Attend) -> Attend:
    # All of torch.compile but its last step, which would need a C++ compiler.
    return torch.compile(attend, backend="aot_eager", fullgraph=attend.is_one_graph)


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


def exchanged(q: Tensor, **named: Tensor) -> Tensor:
    """Kernel attention of a shard that also sends its state on."""
    options = {"feature_map": "hedgehog", "positions": 7, "exchange": Chain(), "return_state": True}
    out, own = kernel_attention(q, **named, **options, backend="triton")
    # Not added up, in an order that depends on the wrapper.
    return torch.cat([out.flatten(), own.sums.flatten()])


FLURKA = partial(flurka_attention, feature_map="hedgehog", rotary=Rotary(12), backend="triton")
IN_FLOAT32 = {"dtype": torch.float32, "length": 20}
OPS: dict[str, tuple[Callable, Callable]] = {
    "gated FLuRKA": (partial(FLURKA, near="softmax"), partial(flurka_tokens, variant="gated", length=20)),
    "composed FLuRKA": (
        partial(flurka_attention, feature_map="hedgehog", rotary=Rotary(12), backend="composed"),
        partial(flurka_tokens, variant="gated", length=20),
    ),
    "FLuRKA of kernels": (
        partial(FLURKA, near="kernel"),
        partial(flurka_tokens, variant="kernel", length=20),
    ),
    "kernel attention": (
        partial(kernel_attention, feature_map="elu", backend="triton"),
        partial(kernel_tokens, **IN_FLOAT32),
    ),
    "weighted attention": (
        partial(weighted_attention, backend="triton"),
        partial(weighted_tokens, **IN_FLOAT32),
    ),
    "a shard": (
        exchanged,
        partial(kernel_tokens, feature_map="hedgehog", heads=4, kv_heads=2, **IN_FLOAT32),
    ),
}
"""Name -> an op, and its inputs."""


@pytest.fixture(scope="module", params=OPS)
def plain(request) -> tuple[Attend, list[Tensor], Tensor]:
    """Each op, its inputs with gradients, and its output."""
    op, draw_leaves = OPS[request.param]
    leaves = draw_leaves(torch.Generator().manual_seed(0), torch.device(DEVICE))
    names, inputs = list(leaves), [x.requires_grad_() for x in leaves.values()]

    def attend(*given: Tensor) -> Tensor:
        named = dict(zip(names, given))
        out = op(2 * named.pop("q"), **named)
        return out if isinstance(out, Tensor) else out[0]

    attend.is_one_graph = op is not exchanged
    out = attend(*inputs)
    out.square().sum().backward()
    return attend, inputs, out.detach()


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.usefixtures("no_random_state_of_a_gpu")
def test_a_wrapped_op_gives_the_same_outputs_and_gradients(wrap, plain):
    attend, inputs, out = plain
    again = [x.detach().clone().requires_grad_() for x in inputs]
    found = WRAPPED[wrap](attend)(*again)
    found.square().sum().backward()
    assert torch.equal(found, out)
    for expected, given in zip(inputs, again):
        assert expected.grad.any()
        assert torch.equal(given.grad, expected.grad)

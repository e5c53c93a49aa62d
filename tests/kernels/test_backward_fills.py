"""Backward fills no memory that grows with the tokens: missing gradients are not materialized as zeros."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.kernels.launch import record_launches
from tests.kernels.calls import FORWARD, LENGTH

FILLS = ("zeros", "zeros_like", "new_zeros", "zero_", "fill_", "full", "full_like", "new_full", "ones")


class Fills(TorchDispatchMode):
    """Records the number of elements of every tensor that is filled."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in FILLS:
            self.sizes.append(found.numel())
        return found


EXPERIMENTS = ("FLuRKA hedgehog, composed", "FLuRKA favor, one normalizer, documents, composed")
"""Write zeros on purpose: kernels add to the gradient of keys, and windows have keys of weight 1. The experiment's page
(benchmarks/results/flurka_composed.md) counts these bytes."""

SHIPPED = {name: call for name, call in FORWARD.items() if name not in EXPERIMENTS}


@pytest.mark.parametrize("call", SHIPPED.values(), ids=SHIPPED)
def test_kernel_backward_fills_no_tensor_that_grows_with_the_sequence(call):
    # Recording launches instead of running them saves time, and everything around them still runs.
    with record_launches():
        out = call()
        pull = torch.empty_like(out)
        with Fills() as fills:
            out.backward(pull)
    assert [size for size in fills.sizes if size >= LENGTH] == []


@pytest.mark.parametrize("backend", ["triton", "chunked"])
def test_a_state_has_the_same_gradients_with_and_without_an_output(backend):
    x = torch.randn(3, 1, 2, 70, 8, requires_grad=True)

    def slopes(share: float | None):
        out, state = kernel_attention(*x, feature_map="elu", return_state=True, backend=backend)
        loss = state.sums.square().sum()
        return torch.autograd.grad(loss if share is None else loss + share * out.sum(), x)[0]

    torch.testing.assert_close(slopes(None), slopes(0.0))

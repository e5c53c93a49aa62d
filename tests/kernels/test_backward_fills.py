"""Backward fills no memory that grows with the tokens: gradients that nobody gave are not made up."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megakernel.ops import kernel_attention
from megakernel.ops.kernels.launch import noting
from tests.kernels.calls import FORWARD, LENGTH

FILLS = ("zeros", "zeros_like", "new_zeros", "zero_", "fill_", "full", "full_like", "new_full", "ones")


class Fills(TorchDispatchMode):
    """Numbers of elements of what is filled."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in FILLS:
            self.sizes.append(found.numel())
        return found


@pytest.mark.parametrize("call", FORWARD.values(), ids=FORWARD)
def test_backward_of_kernels_fills_nothing_that_grows_with_the_tokens(call):
    # Noted down, a launch takes no time, and everything around it happens.
    with noting():
        out = call()
        pull = torch.empty_like(out)
        with Fills() as fills:
            out.backward(pull)
    assert [size for size in fills.sizes if size >= LENGTH] == []


@pytest.mark.parametrize("backend", ["triton", "chunked"])
def test_a_state_alone_has_the_gradients_that_it_has_beside_an_output(backend):
    x = torch.randn(3, 1, 2, 70, 8, requires_grad=True)

    def slopes(share: float | None):
        out, state = kernel_attention(*x, feature_map="elu", return_state=True, backend=backend)
        loss = state.sums.square().sum()
        return torch.autograd.grad(loss if share is None else loss + share * out.sum(), x)[0]

    torch.testing.assert_close(slopes(None), slopes(0.0))

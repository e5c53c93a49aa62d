"""The ops of a transformer layer in torch."""

import pytest
import torch
import torch.nn.functional as F

from megakernel.ops.layers import plain


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setitem(plain.ROWS, "cpu", 3)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(7, 2, 6), (2, 6), (0, 6)])
def test_backward_of_rms_norm(small_chunks, shape, offset):
    x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(shape, dtype=torch.float64)
    expected = torch.autograd.grad(F.rms_norm(x, (6,), offset + weight, 1e-5), (x, weight), pull)
    found = torch.autograd.grad(plain.rms_norm(x, weight, 1e-5, offset), (x, weight), pull)
    for right, actual in zip(expected, found, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-12, atol=1e-12)


def test_rms_norm_of_strided_rows(small_chunks):
    x = torch.randn(6, 5, dtype=torch.float64).T.requires_grad_()
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *t: plain.rms_norm(*t, 1e-5), (x, weight))


def gradients_of_both_paths(of_both, tensors, pulls):
    """The outputs of `of_both` for x and weight, and their gradients."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    outputs = of_both(*leaves)
    return [*outputs, *torch.autograd.grad(outputs, leaves, pulls)]


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(7, 2, 6), (1, 6), (0, 6)])
def test_the_gradient_of_the_residual_is_added_bit_for_bit(small_chunks, shape, offset):
    """In float32. In bfloat16 the sum is rounded once, not twice: its error is no larger."""
    tensors = torch.randn(*shape), torch.randn(6)
    pulls = [torch.randn(*shape), 3 * torch.randn(*shape)]

    def apart(x, weight):
        return plain.rms_norm(x, weight, 1e-5, offset), x

    def together(x, weight):
        return plain.rms_norm_and_residual(x, weight, 1e-5, offset)

    for right, actual in zip(*(gradients_of_both_paths(f, tensors, pulls) for f in (apart, together))):
        assert torch.equal(actual, right)
    narrow = [[x.bfloat16() for x in group] for group in (tensors, pulls)]
    exact = gradients_of_both_paths(apart, *([x.double() for x in group] for group in narrow))[2]
    errors = [(gradients_of_both_paths(f, *narrow)[2] - exact).norm() for f in (together, apart)]
    assert errors[0] <= errors[1]


def test_a_weight_centered_at_zero_loses_no_bits():
    x, weight = torch.randn(4, 8).bfloat16(), (torch.randn(8) / 300).bfloat16()
    exact = F.rms_norm(x.float(), (8,), 1 + weight.float(), 1e-5).bfloat16()
    assert torch.equal(plain.rms_norm(x, weight, 1e-5, 1.0), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 2, 10), (1, 10), (0, 10)])
def test_swiglu_and_its_gradient_equal_the_formula_bit_for_bit(small_chunks, shape, dtype):
    x = torch.randn(*shape).to(dtype).requires_grad_()
    gate, up = x.chunk(2, -1)
    expected, found = F.silu(gate) * up, plain.swiglu(x)
    pull = torch.randn(*expected.shape).to(dtype)
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(out, x, pull)[0] for out in (found, expected)))


def _bytes_kept(run):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run()
    return sum(t.nbytes for t in kept)


def test_rms_norm_keeps_nothing_wider_than_its_input():
    x = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(32, dtype=torch.bfloat16, requires_grad=True)
    assert _bytes_kept(lambda: plain.rms_norm(x, weight, 1e-5)) == x.nbytes + weight.nbytes


def test_swiglu_keeps_only_its_input():
    x = torch.randn(64, 32, requires_grad=True)
    assert _bytes_kept(lambda: plain.swiglu(x)) == x.nbytes

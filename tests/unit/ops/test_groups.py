import pytest
import torch

from megakernel.ops.flurka_attention import flurka_attention
from megakernel.ops.gated_delta_rule import gated_delta_rule
from megakernel.ops.groups import SHORT, scan_groups
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.simple_gla import simple_gla
from megakernel.ops.window_attention import window_attention
from tests.unit.ops.comparing import random


def _moving_sum(positions, carry, sequences, shared):
    x, missing = sequences
    assert missing is None
    running = carry[0][:, :, None] + (x * shared[0]).cumsum(2)
    return (running.tanh(),), (running[:, :, -1],)


def test_groups_give_the_values_and_gradients_of_one_pass():
    x, weight, carry = random(2, 3, 11, 4), random(4, seed=1), random(2, 3, 4, seed=2)
    results = []
    for group in (11, 4, 1):
        (out,), (left,) = scan_groups(_moving_sum, (carry,), (x, None), (weight,), group=group)
        slopes = torch.autograd.grad(out.square().sum() + left.sin().sum(), (x, weight, carry))
        results.append((out, left, *slopes))
    for other in results[1:]:
        for one, many in zip(results[0], other):
            torch.testing.assert_close(many, one)


def test_gradients_are_computed_only_for_inputs_that_require_them():
    x, weight, carry = random(1, 1, 6, 2).detach(), random(2, seed=1), random(1, 1, 2, seed=2).detach()
    (out,), _ = scan_groups(_moving_sum, (carry,), (x, None), (weight,), group=2)
    (slope,) = torch.autograd.grad(out.sum(), weight)
    (whole,), _ = scan_groups(_moving_sum, (carry,), (x, None), (weight,), group=6)
    torch.testing.assert_close(slope, torch.autograd.grad(whole.sum(), weight)[0])


def _kernel(q, k, v):
    return kernel_attention(q, k, v, feature_map="elu")


def _flurka(q, k, v):
    pool = torch.full((2, 16), 1 / 16)
    return flurka_attention(q, k, v, feature_map="elu", pool_keys=pool, pool_values=pool)[0]


def _window(q, k, v):
    return window_attention(q, k, v, block_size=16)[0]


def _delta(q, k, v):
    return gated_delta_rule(q, k / k.norm(dim=-1, keepdim=True), v, torch.tensor(-0.1), torch.tensor(0.5))[1]


def _kernel_state(q, k, v):
    return kernel_attention(q, k, v, feature_map="elu", return_state=True)[1].sums


def _gla(q, k, v):
    return simple_gla(q, k, v, torch.tensor(-0.1))[1]


@pytest.mark.parametrize("op", [_kernel, _flurka, _window, _delta, _kernel_state, _gla])
@pytest.mark.usefixtures("short_groups")
def test_autocast_changes_no_bit_of_an_op_of_several_groups(op):
    leaves = [random(1, 2, 600, 8, seed=seed).detach().float().requires_grad_() for seed in range(3)]
    expected = op(*leaves)
    slopes = torch.autograd.grad(expected.square().sum(), leaves, allow_unused=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = op(*leaves)
        found = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
    assert torch.equal(out, expected)
    assert all(one is other or torch.equal(one, other) for one, other in zip(found, slopes))


@pytest.mark.parametrize("length", [2 * SHORT, 16384])
@pytest.mark.parametrize("op", [_kernel, _flurka, _window])
def test_a_long_sequence_saves_little_besides_its_inputs_for_backward(op, length):
    width = 8
    q, k, v = (torch.randn(1, 1, length, width, requires_grad=True) for _ in range(3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        op(q, k, v)
    numbers = sum(x.numel() for x in kept)
    # q, k and v, and a few states: no features, weights or chunk states of the whole sequence.
    assert numbers <= 1.05 * 3 * length * width

"""Gradients of queries, keys and values that are columns of one tensor are written as columns of one."""

import pytest
import torch

from megakernel.ops import joined
from megakernel.ops.flurka_attention import flurka_attention
from megakernel.ops.joined import gradient_buffers, split_columns
from megakernel.ops.kernel_attention import kernel_attention
from tests.kernels.comparing import DEVICE, every_dtype, random

BATCH, HEADS, LENGTH, WIDTH = 2, 2, 20, 16


def flurka(q, k, v):
    pool = torch.eye(8, device=DEVICE)[:2]
    options = {"feature_map": "elu", "gate": torch.zeros(HEADS, 1, device=DEVICE), "return_state": False}
    return flurka_attention(q, k, v, pool_keys=pool, pool_values=pool, **options, backend="triton")[0]


def kernel(q, k, v):
    return kernel_attention(q, k, v, feature_map="elu", backend="triton")


def by_heads(part):
    """(N, B, H, columns) -> (B, H, N, d), as `SelfAttention` does it."""
    return part.unflatten(3, (-1, WIDTH)).permute(1, 2, 3, 0, 4).flatten(1, 2)


@every_dtype
@pytest.mark.parametrize("call", [flurka, kernel])
def test_gradients_are_not_copied_and_have_the_bits_of_copied_ones(call, dtype, monkeypatch):
    x = random(LENGTH, BATCH, HEADS, 3 * WIDTH, seed=1, dtype=dtype).requires_grad_()
    pull = random(BATCH, HEADS, LENGTH, WIDTH, seed=2, dtype=dtype)

    def gradient():
        out = call(*map(by_heads, split_columns(x, [WIDTH] * 3)))
        return torch.autograd.grad(out, x, pull)[0]

    copies, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts, dim: copies.append(dim) or cat(parts, dim))
    found = gradient()
    assert copies == []
    assert found.is_contiguous()
    monkeypatch.setattr(joined, "joined", lambda parts: None)
    expected = gradient()
    assert copies == [-1]
    assert torch.equal(found, expected)


def test_parts_that_are_used_twice_or_not_at_all_have_the_gradients_of_split():
    x = random(5, 2, 2, 12, seed=1).requires_grad_()
    weights = random(5, 2, 2, 4, seed=2)

    def gradient(split):
        a, b, _ = split(x)
        return torch.autograd.grad((a * b * weights).sum() + a.square().sum(), x)[0]

    assert torch.equal(gradient(lambda x: split_columns(x, [4] * 3)), gradient(lambda x: x.split(4, -1)))
    twice = torch.autograd.grad(gradient_of_cubes(x), x)[0]
    torch.testing.assert_close(twice, 6 * x.detach())


def gradient_of_cubes(x):
    """The sum of the gradient of x^3, which can be differentiated again."""
    cubes = sum(part.pow(3).sum() for part in split_columns(x, [4, 2, 6]))
    return torch.autograd.grad(cubes, x, create_graph=True)[0].sum()


def test_only_columns_of_one_tensor_are_joined():
    whole = torch.arange(2 * 3 * 12.0).view(2, 3, 12)
    parts = whole.split([4, 2, 6], -1)
    assert torch.equal(joined.joined(parts), whole)
    middle = joined.joined(parts[1:])
    assert torch.equal(middle, whole[..., 4:])
    for others in (
        parts[::-1],
        (parts[0], parts[2]),
        (parts[0], parts[1].clone(), parts[2]),
        (parts[0], parts[0]),
        (parts[0][:1], parts[1], parts[2]),
        tuple(part.transpose(0, 1) for part in whole.split(1, 0)),
    ):
        assert joined.joined(others) is None
    gaps = torch.arange(2 * 3 * 12.0).view(2, 3, 12)[:, :, :10]
    assert torch.equal(joined.joined(gaps.split(5, -1)), gaps)


def test_buffers_are_columns_where_the_tensors_are():
    whole = torch.empty(7, 2, 3, 12).permute(1, 2, 0, 3)
    buffers = gradient_buffers(*whole.split(4, -1))
    assert [x.shape for x in buffers] == [(2, 3, 7, 4)] * 3
    made = joined.joined(buffers)
    assert made is not None
    assert made.stride() == whole.stride()
    apart = gradient_buffers(*(x.clone() for x in whole.split(4, -1)))
    assert all(x.is_contiguous() for x in apart)
    grouped = gradient_buffers(torch.empty(1, 4, 5, 8), *torch.empty(1, 2, 5, 16).split(8, -1))
    assert [x.shape for x in grouped] == [(1, 4, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)]

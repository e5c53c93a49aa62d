import pytest
import torch

from megakernel.ops.hadamard import hadamard, hadamard_matrix
from megakernel.ops.projections import FastFood, dense, padded_width, project


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fast_food(heads: int, blocks: int, size: int) -> FastFood:
    scales, gaussians, signs, order = random(4, heads, blocks, size)
    return FastFood(scales, gaussians, signs.sign(), order.argsort(-1))


@pytest.mark.parametrize("size", [1, 2, 4, 64, 256])
def test_the_fast_transform_equals_the_product_with_sylvesters_matrix(size):
    x = random(3, 2, size)
    matrix = hadamard_matrix(size, x)
    assert torch.equal(matrix @ matrix, size * torch.eye(size, dtype=x.dtype))
    assert torch.equal(matrix.abs(), torch.ones_like(matrix))
    # Sums of up to 256 numbers in another order.
    torch.testing.assert_close(hadamard(x), x @ matrix, rtol=1e-12, atol=1e-12)


def test_gradients_of_the_transform_equal_finite_differences():
    assert torch.autograd.gradcheck(hadamard, random(2, 8).requires_grad_())


def test_the_transform_does_not_change_its_input():
    x = random(2, 8)
    before = x.clone()
    hadamard(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("width", "blocks"), [(8, 1), (8, 3), (6, 2), (1, 2)])
def test_fastfood_equals_its_dense_matrix(width, blocks):
    """Also if tokens are padded to a power of two."""
    projection = fast_food(2, blocks, padded_width(width))
    x = random(3, 2, 4, 5, width, seed=1)
    matrix = dense(projection, width)
    assert matrix.shape == (2, blocks * width, width)
    torch.testing.assert_close(project(x, projection), project(x, matrix), rtol=1e-12, atol=1e-12)


def test_fastfood_learns_through_the_fast_transform():
    projection = fast_food(1, 2, 4)
    x = random(1, 1, 1, 3, 3).requires_grad_()
    diagonals = [part.requires_grad_() for part in projection[:3]]
    assert torch.autograd.gradcheck(
        lambda x, *diagonals: project(x, FastFood(*diagonals, projection.permutation)), (x, *diagonals)
    )

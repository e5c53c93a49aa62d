"""FastFood features of the kernels are those of the dense matrix."""

import pytest
import torch

from megakernel.ops.dispatch import VARIABLE
from megakernel.ops.fastfood_features import fastfood_features
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.projections import FastFood, padded_width
from tests.kernels.comparing import TOLERANCE, random, rms_ratio
from tests.tiers import tiered


def fast_food(heads: int, blocks: int, width: int, seed: int = 1) -> FastFood:
    scales, gaussians, signs, order = random(4, heads, blocks, padded_width(width), seed=seed)
    return FastFood(scales, gaussians, signs.sign(), order.argsort(-1))


def leaves(x: torch.Tensor, projection: FastFood, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The tokens and the diagonals, in their own dtypes or in `dtype`."""
    return [part.detach().clone().to(dtype or part.dtype).requires_grad_() for part in (x, *projection[:3])]


def run(feature_map: str, backend: str, x: torch.Tensor, *diagonals: torch.Tensor, order: torch.Tensor):
    """Features with their scales, and the gradients of a random sum of their values."""
    values, logs = fastfood_features(x, FastFood(*diagonals, order), feature_map=feature_map, backend=backend)
    pull = random(*values.shape, seed=2).to(values.dtype)
    gradients = torch.autograd.grad((values * pull).sum(), (x, *diagonals))
    return [values, *([] if logs is None else [logs]), *gradients]


def assert_same_as_reference(feature_map: str, x: torch.Tensor, projection: FastFood) -> None:
    fast = run(feature_map, "triton", *leaves(x, projection), order=projection.permutation)
    inputs = leaves(x, projection, torch.float64)
    exact = run(feature_map, "reference", *inputs, order=projection.permutation)
    assert len(fast) == len(exact)
    for ours, theirs in zip(fast, exact):
        assert rms_ratio(ours, theirs) <= TOLERANCE[ours.dtype]


@pytest.mark.covering(1)
@pytest.mark.parametrize("feature_map", ["rks", "prf", "favor"])
@pytest.mark.parametrize(("width", "blocks"), [(16, 1), (12, 3), (64, 2), (128, 1)])
def test_features_and_gradients_equal_those_of_the_dense_matrix(feature_map, width, blocks):
    """Also if tokens or blocks are padded to a power of two."""
    assert_same_as_reference(feature_map, random(2, 2, 17, width, seed=0), fast_food(2, blocks, width))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", tiered([1, 17, 64, 1000, 4096], [1, 17, 64, 1000]))
def test_sequences_of_any_length_equal_the_reference(length, dtype):
    x = random(1, 1, length, 16, seed=0, dtype=dtype)
    for feature_map in ("rks", "prf"):
        assert_same_as_reference(feature_map, x, fast_food(1, 1, 16))


@pytest.mark.parametrize("width", [1, 2])
def test_narrow_heads_equal_the_reference(width):
    assert_same_as_reference("rks", random(1, 2, 5, width, seed=0), fast_food(2, 2, width))


def test_large_exponents_stay_in_range():
    """Inputs of scale 10: log scales reach hundreds, values are between 0 and 1."""
    assert_same_as_reference("prf", 10 * random(1, 2, 17, 16, seed=0), fast_food(2, 2, 16))


def test_tokens_may_lie_anywhere_in_memory():
    """Like queries that are views of one projection for all heads."""
    x = random(2, 9, 3, 16, seed=0).transpose(1, 2)[:, :2]
    assert not x.is_contiguous()
    assert_same_as_reference("rks", x, fast_food(2, 1, 16))


def test_two_runs_are_bit_identical():
    x, projection = random(2, 2, 100, 16, seed=0), fast_food(2, 2, 16)
    runs = [run("prf", "triton", *leaves(x, projection), order=projection.permutation) for _ in range(2)]
    assert all(torch.equal(first, second) for first, second in zip(*runs))


def test_the_operators_pass_opcheck():
    """Fake implementations, gradients and aliasing are what torch.compile and checkpointing expect."""
    from megakernel.ops.fastfood_features import triton

    projection = fast_food(2, 2, 12)
    for feature_map in ("rks", "prf"):
        x, *diagonals = leaves(random(1, 2, 5, 12, seed=0), projection)
        torch.library.opcheck(triton._forward, (x, *diagonals, projection.permutation, feature_map))


def test_chunked_attention_computes_features_with_the_kernels(monkeypatch):
    """With gradients down to the diagonals, through the recomputation of groups."""
    from megakernel.ops.fastfood_features import triton

    launched = []

    def counting(kernel, *arguments, **options):
        launched.append(kernel.fn.__name__)
        launch(kernel, *arguments, **options)

    launch = triton.launch
    monkeypatch.setattr(triton, "launch", counting)
    monkeypatch.setenv(VARIABLE, "triton")
    q, k, v = (random(1, 2, 20, 8, seed=seed) for seed in range(3))
    projection = fast_food(2, 2, 8)
    results = {}
    for backend, dtype in (("chunked", torch.float32), ("reference", torch.float64)):
        query, *diagonals = leaves(q, projection, dtype)
        out = kernel_attention(
            query,
            k.to(dtype),
            v.to(dtype),
            feature_map="prf",
            projection=FastFood(*diagonals, projection.permutation),
            backend=backend,
        )
        results[backend] = [out, *torch.autograd.grad(out.square().sum(), (query, *diagonals))]
    assert set(launched) == {"write_features", "write_gradients"}
    for ours, theirs in zip(results["chunked"], results["reference"]):
        assert rms_ratio(ours, theirs) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("dtype", "blocks", "reason"),
    [(torch.float64, 1, "x is torch.float64"), (torch.float32, 65, "blocks of")],
)
def test_unsupported_inputs_are_refused_with_a_reason(dtype, blocks, reason):
    x = random(1, 1, 3, 16, seed=0).to(dtype)
    with pytest.raises(ValueError, match=reason):
        fastfood_features(x, fast_food(1, blocks, 16), feature_map="rks", backend="triton")


def test_arguments_that_do_not_fit_are_named():
    x, projection = random(1, 1, 3, 16, seed=0), fast_food(1, 1, 16)
    with pytest.raises(ValueError, match="feature_map='elu'; expected one of"):
        fastfood_features(x, projection, feature_map="elu")
    with pytest.raises(
        ValueError, match=r"projection.scales has shape \(2, 1, 16\); expected \(1, blocks, 16\)"
    ):
        fastfood_features(x, fast_food(2, 1, 16), feature_map="rks")
    with pytest.raises(ValueError, match=r"x has shape \(1, 3, 16\)"):
        fastfood_features(x[0], projection, feature_map="rks")

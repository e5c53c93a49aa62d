"""The kernels of the short convolution agree with `by_taps` in float64, with gradients of all inputs."""

from functools import partial

import pytest
import torch

from megakernel.ops.short_convolution import short_convolution
from tests.kernels.comparing import DEVICE, TOLERANCE, assert_agrees, random
from tests.tiers import tiered

PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 0, *range(14)]])
POSITIONS = {"whole": 0, "continued": 5, "near its beginning": 2, "packed": PACKED}


def leaves(width: int, channels: int, length: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes = {"q": (2, 2, 3, length, channels), "before": (2, 2, 3, width - 1, channels)}
    shapes["weight"] = (2, 3, channels, width)
    return {name: random(*shape, seed=seed, dtype=dtype) for seed, (name, shape) in enumerate(shapes.items())}


def run(backend, leaves, positions):
    if isinstance(positions, torch.Tensor):
        positions = positions.to(DEVICE)
    return {
        "out": short_convolution(
            *(leaves[name] for name in ("q", "weight", "before")), positions, backend=backend
        )
    }


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize(
    ("width", "channels"), tiered([(4, 16), (2, 12), (5, 64), (1, 3), (8, 130)], [(4, 16), (5, 64)])
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_equal_the_reference(positions, width, channels, dtype, draw):
    assert_agrees(
        partial(run, positions=positions), leaves(width, channels, 17, dtype), draw, TOLERANCE[dtype]
    )


LONG = torch.cat([torch.arange(9, 60), *map(torch.arange, (1, 2, 130, 3, 113))])[None].expand(2, -1)
"""Positions with so few documents that `by_taps` computes only the tokens at document starts."""


@pytest.mark.parametrize("positions", (POSITIONS | {"packed": LONG}).values(), ids=POSITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_convolution_by_rows_equals_that_by_taps(positions, dtype, draw, monkeypatch):
    """`by_rows`, which CPUs run; the float64 reference is `by_taps`."""

    def chunked(_, leaves):
        return run("chunked", leaves, positions)

    monkeypatch.setattr("megakernel.ops.short_convolution.CACHED_ELEMENTS", 0)
    assert_agrees(chunked, leaves(4, 16, 300, dtype), draw, TOLERANCE[dtype])


def test_the_convolution_by_rows_sees_no_other_document(monkeypatch):
    monkeypatch.setattr("megakernel.ops.short_convolution.CACHED_ELEMENTS", 0)
    positions = LONG[:, 51:]  # documents of one token, of two, and of many
    given = leaves(4, 16, positions.shape[1], torch.float32)
    expected = run("chunked", given, positions)["out"]
    given["before"].fill_(float("nan"))
    given["q"][..., :3, :] = float("nan")
    torch.testing.assert_close(run("chunked", given, positions)["out"][..., 3:, :], expected[..., 3:, :])


@pytest.mark.parametrize("length", tiered([1, 3, 300], [1, 3]))
def test_sequences_of_any_length_equal_the_reference(length, draw):
    """Shorter than a filter, and over several spans of a program."""
    assert_agrees(partial(run, positions=0), leaves(4, 16, length, torch.float32), draw, 1e-5)


def test_unsupported_inputs_are_refused_with_a_reason():
    given = [leaves(9, 4, 3, torch.float32)[name] for name in ("q", "weight", "before")]
    with pytest.raises(ValueError, match="9 taps of 4 channels; expected at most 8 of at most 256"):
        short_convolution(*given, 0, backend="triton")
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        short_convolution(*(part.double() for part in given), 0, backend="triton")


@pytest.mark.parametrize("positions", [0, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("order", [(3, 0, 1, 2, 4), (0, 1, 2, 4, 3)], ids=["projection", "channels first"])
def test_any_memory_layout_gives_the_same(order, positions, draw):
    """As the fused projection has queries, keys and values, (N, B, H_kv, vectors, d), and transposed."""
    back = [order.index(dimension) for dimension in range(5)]

    def run_in_order(backend, leaves):
        x, before = (leaves[name].permute(order).contiguous().permute(back) for name in ("q", "before"))
        inputs = {**leaves, "q": x, "before": before}
        out = run(backend, inputs, positions)
        if backend == "triton" and order[-1] == 4:
            assert out["out"].stride() == inputs["q"].stride()
        return out

    assert_agrees(run_in_order, leaves(4, 16, 17, torch.float32), draw, TOLERANCE[torch.float32])


def test_without_earlier_tokens_they_are_zeros(draw):
    def run_without(backend, leaves):
        given = {**leaves, "before": None} if backend == "triton" else leaves
        return run(backend, given, 5)

    given = leaves(4, 16, 17, torch.float32)
    given["before"].zero_()
    out, expected = (run_without(backend, given)["out"] for backend in ("triton", "reference"))
    torch.testing.assert_close(out, expected)

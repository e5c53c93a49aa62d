"""Skyformer and Nyströmformer against outputs of the published code."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.attention import build
from megakernel.papers.skyformer import nystrom_attention
from megakernel.papers.skyformer.nystrom_attention import depthwise_convolution
from megakernel.papers.skyformer.pseudo_inverse import (
    exact_inverse,
    iterative_inverse,
    largest_column_sum,
    normalized_gram,
)
from megakernel.papers.skyformer.skyformer_attention import skyformer_attention
from tests.oracles import arrays, assert_equal, heads, joined


def sky(*keys: str) -> list[Tensor]:
    return arrays("skyformer_d32", *keys)


def coupled_inverse(gram: Tensor) -> Tensor:
    """Starts the iteration from the largest column sum of the batch, as published, not from that of each matrix."""
    matrix, root = normalized_gram(gram, 0.1)
    inverse = iterative_inverse(matrix, largest_column_sum(matrix).amax())
    return inverse * root[..., None] * root[..., None, :]


@pytest.mark.parametrize("masked", ["", "_masked"])
def test_skyformer_equals_the_published_code(masked):
    q, k, v, mask = sky("q", "k", "v", "mask")
    rows, out, exact, pinv = sky(
        *(f"{x}{masked}" for x in ("S", "out", "out_exact_gamma0.1", "out_exact_pinv"))
    )
    real = mask.bool() if masked else torch.ones_like(mask).bool()

    def attend(invert):
        # The published code zeroes padded queries, which then attend; padding is never a landmark.
        zeroed = q * real[:, None, :, None]
        return skyformer_attention(
            zeroed, k, v, landmarks=rows, invert=invert, key_mask=real if masked else None
        )

    def solve(gram: Tensor) -> Tensor:
        return torch.linalg.inv(gram + 0.1 * torch.eye(len(gram[0, 0])))

    assert_equal(attend(coupled_inverse), out)
    assert_equal(attend(solve), exact)
    assert_equal(attend(exact_inverse), pinv)


@pytest.mark.parametrize("masked", ["", "_masked"])
def test_the_iterative_inverse_equals_the_code_of_skyformer(masked):
    matrix, inverse = sky(f"inv_in{masked}", f"inv_out{masked}")
    assert_equal(iterative_inverse(matrix, largest_column_sum(matrix).amax()), inverse)


def nystrom(*keys: str) -> list[Tensor]:
    return arrays("nystrom_lucidrains", *keys)


def coupled_softmax_inverse(matrix: Tensor) -> Tensor:
    """Starts from the largest sums of the batch, as published."""
    return iterative_inverse(matrix, largest_column_sum(matrix).amax() * matrix.sum(-1).amax())


def projected(x: Tensor) -> list[Tensor]:
    return [heads(part) for part in (x @ nystrom("w.to_qkv.weight")[0].T).chunk(3, -1)]


def output(attended: Tensor, v: Tensor) -> Tensor:
    kernel, weight, bias = nystrom("w.res_conv.weight", "w.to_out.0.weight", "w.to_out.0.bias")
    return F.linear(joined(attended + depthwise_convolution(v, kernel[:, 0, :, 0])), weight, bias)


def test_the_iterative_inverse_equals_lucidrains():
    matrix, inverse = nystrom("pinv_in", "pinv_out")
    assert_equal(coupled_softmax_inverse(matrix), inverse)


@pytest.mark.parametrize(("length", "key"), [(96, "out"), (90, "out_x90")])
def test_nystromformer_equals_lucidrains(length, key, monkeypatch):
    x, expected = nystrom("x", key)
    # The published code fills the first segment with zeros, which count as tokens.
    q, k, v = projected(F.pad(x[:, :length], (0, 0, 96 - length, 0)))
    segments = torch.arange(96)[None] // 6
    monkeypatch.setattr(nystrom_attention, "softmax_inverse", coupled_softmax_inverse)
    attended = nystrom_attention.nystrom_attention(q, k, v, segments=segments, count=16)
    assert_equal(output(attended, v)[:, -length:], expected)


def test_nystromformer_with_padding_equals_lucidrains():
    # In the published code, segments of only padding are landmarks with uniform attention; here they are no landmarks.
    x, mask, expected = nystrom("x", "mask", "out_masked")
    real = mask.bool()
    q, k, v = (part * mask[:, None, :, None] for part in projected(x))
    q = q * 16**-0.5
    sizes = mask.unflatten(1, (16, 6)).sum(-1)
    mean_q, mean_k = (part.unflatten(2, (16, 6)).sum(3) / (sizes[:, None, :, None] + 1e-8) for part in (q, k))
    exists = sizes > 0

    def softmax(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        visible = rows[:, None, :, None] & columns[:, None, None]
        return (a @ b.transpose(-1, -2)).masked_fill(~visible, torch.finfo(a.dtype).min).softmax(-1)

    landmark_weights = softmax(mean_q, mean_k, exists, exists)
    attended = softmax(q, mean_k, real, exists) @ coupled_softmax_inverse(landmark_weights)
    attended = attended @ (softmax(mean_q, k, exists, real) @ v)
    assert_equal(output(attended, v), expected)


def test_a_nystromformer_layer_is_the_op_over_equal_segments():
    (x,) = nystrom("x")
    q, k, v = projected(x)
    module = build(
        {"preset": "nystromformer", "nystromformer": {"landmarks": 16}},
        num_heads=2,
        head_dim=16,
        causal=False,
    )
    segments = torch.arange(96)[None] // 6
    assert_equal(module(q, k, v), nystrom_attention.nystrom_attention(q, k, v, segments=segments, count=16))

import pytest
import torch
from torch import Tensor

from megakernel.ops.nystrom_attention import depthwise_convolution, nystrom_attention
from tests.unit.ops.comparing import random

B, H, KV, N, WIDTH, VALUES, COUNT = 2, 4, 2, 22, 4, 3, 5


def reference(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, real: Tensor, invert) -> Tensor:
    """One row and head: N x N scores from means that are taken one by one; q, k (n, d), v (n, D)."""
    q, k, v, segments = q[real], k[real], v[real], segments[real]
    used = segments.unique().tolist()
    mean_q, mean_k = (torch.stack([x[segments == s].mean(0) for s in used]) for x in (q, k))

    def softmax(a: Tensor, b: Tensor) -> Tensor:
        weights = torch.exp(a @ b.T * WIDTH**-0.5)
        return weights / weights.sum(-1, keepdim=True)

    scores = softmax(q, mean_k) @ invert(softmax(mean_q, mean_k)) @ softmax(mean_q, k)
    out = v.new_zeros(len(real), VALUES)
    out[real] = scores @ v
    return out


@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_quadratic_reference(masked):
    q, k, v = (
        random(*shape, seed=i)
        for i, shape in enumerate(((B, H, N, WIDTH), (B, KV, N, WIDTH), (B, KV, N, VALUES)))
    )
    real = torch.ones(B, N, dtype=torch.bool)
    segments = (torch.arange(N) * COUNT // N).expand(B, -1)
    if masked:
        real = torch.rand(B, N, generator=torch.Generator().manual_seed(0)) > 0.4
        real[1, segments[1] == 3] = False  # a segment of padding alone
    # An exact inverse does not couple landmarks that do not exist with the others.
    out = nystrom_attention(
        q, k, v, segments=segments, count=COUNT, invert=torch.linalg.inv, key_mask=real if masked else None
    )
    expected = torch.stack(
        [
            torch.stack(
                [
                    reference(q[b, h], k[b, h // 2], v[b, h // 2], segments[b], real[b], torch.linalg.inv)
                    for h in range(H)
                ]
            )
            for b in range(B)
        ]
    )
    seen = real[:, None, :, None]
    torch.testing.assert_close(out * seen, expected)
    slopes = [torch.autograd.grad((x * seen).square().sum(), (q, k, v)) for x in (out, expected)]
    torch.testing.assert_close(*slopes)


def test_as_many_segments_as_tokens_are_softmax_attention():
    q, k, v = (random(1, 1, 6, WIDTH, seed=i) for i in range(3))
    out = nystrom_attention(q, k, v, segments=torch.arange(6)[None], count=6, invert=torch.linalg.inv)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))


def test_a_convolution_stays_in_its_head_and_looks_both_ways():
    v = torch.zeros(1, 2, 5, 3, dtype=torch.float64)
    v[0, 0, 2] = 1.0
    kernel = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
    out = depthwise_convolution(v, kernel)
    assert out[0, 0, :, 0].tolist() == [0, 3, 2, 1, 0]
    assert not out[0, 1].any()

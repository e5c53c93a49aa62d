import pytest
import torch

from megakernel.papers.skyformer import nystrom_attention
from megakernel.papers.skyformer.pseudo_inverse import softmax_inverse
from tests.unit.ops.comparing import assert_same, random

B, H, KV, N, WIDTH, VALUES, COUNT = 2, 4, 2, 22, 4, 3, 5


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("invert", [torch.linalg.inv, softmax_inverse], ids=["exact", "iterative"])
def test_equals_the_quadratic_reference(masked, invert, monkeypatch):
    monkeypatch.setattr(nystrom_attention, "softmax_inverse", invert)
    q, k, v = (
        random(*shape, seed=i)
        for i, shape in enumerate(((B, H, N, WIDTH), (B, KV, N, WIDTH), (B, KV, N, VALUES)))
    )
    real = torch.ones(B, N, dtype=torch.bool)
    segments = (torch.arange(N) * COUNT // N).expand(B, -1)
    if masked:
        real = torch.rand(B, N, generator=torch.Generator().manual_seed(0)) > 0.4
        real[1, segments[1] == 3] = False  # a segment of padding alone

    def run(backend):
        options = {"count": COUNT, "key_mask": real, "backend": backend}
        out = nystrom_attention.nystrom_attention(q, k, v, segments=segments, **options)
        # Outputs at padding do not matter.
        return [out * real[:, None, :, None]]

    assert_same(run, [q, k, v])


def test_as_many_segments_as_tokens_equal_softmax_attention(monkeypatch):
    monkeypatch.setattr(nystrom_attention, "softmax_inverse", torch.linalg.inv)
    q, k, v = (random(1, 1, 6, WIDTH, seed=i) for i in range(3))
    out = nystrom_attention.nystrom_attention(q, k, v, segments=torch.arange(6)[None], count=6)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))


def test_a_convolution_stays_in_its_head_and_is_bidirectional():
    v = torch.zeros(1, 2, 5, 3, dtype=torch.float64)
    v[0, 0, 2] = 1.0
    kernel = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
    out = nystrom_attention.depthwise_convolution(v, kernel)
    assert out[0, 0, :, 0].tolist() == [0, 3, 2, 1, 0]
    assert not out[0, 1].any()

"""The faster interpreter converts numbers as GPUs do."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.comparing import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="kernels run on the GPU")


@triton.jit
def convert(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@pytest.mark.parametrize(
    ("of", "to"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str
)
def test_conversions_are_those_of_torch(of, to):
    special = [
        1.9999,
        -0.4999999,
        1e-40,
        3.4e38,
        torch.inf,
        -torch.inf,
        torch.nan,
        0.0,
        1 + 2**-8,
        1 + 3 * 2**-8,
    ]
    x = torch.cat([torch.tensor(special), 10 ** (20 * torch.randn(1014))]).to(of)
    out = torch.empty(1024, dtype=to)
    convert[(1,)](x, out, 1024)
    torch.testing.assert_close(out, x.to(to), rtol=0, atol=0, equal_nan=True)

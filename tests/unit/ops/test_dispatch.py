"""Which implementation of an op runs."""

import warnings

import pytest
import torch
from torch import Tensor

from megakernel.ops import dispatch, flurka_attention, kernel_attention


class OnGpu(Tensor):
    """Says that it is on a GPU, which is what the dispatcher asks for, and computes where it is."""

    is_cuda = True


def attend(width: int, dtype: torch.dtype, backend: str | None) -> Tensor:
    q = torch.linspace(-1, 1, 8 * width).view(1, 1, 8, width).to(dtype).as_subclass(OnGpu)
    return kernel_attention(q, q, q, feature_map="elu", backend=backend)


def attend_landmarks(width: int, dtype: torch.dtype, backend: str | None) -> Tensor:
    q = torch.linspace(-1, 1, 8 * width).view(1, 1, 8, width).to(dtype).as_subclass(OnGpu)
    pool = torch.full((2, 4), 0.25)
    gate = torch.zeros(1, 1, 8)
    options = {"pool_keys": pool, "pool_values": pool, "gate": gate, "backend": backend}
    return flurka_attention(q, q, q, feature_map="elu", **options)[0]


@pytest.mark.parametrize(
    ("run", "width", "dtype", "warning"),
    [
        (attend, 136, torch.bfloat16, "kernel_attention runs without its kernels: q has width 136"),
        (attend_landmarks, 32, torch.float32, "flurka_attention runs without its kernels: q has width 32"),
    ],
)
def test_widths_that_kernels_cannot_take_run_chunked_with_one_warning(run, width, dtype, warning):
    dispatch._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        outputs = [run(width, dtype, None) for _ in range(2)]
    assert all(torch.equal(one, run(width, dtype, "chunked")) for one in outputs)
    assert [str(one.message).startswith(warning) for one in seen] == [True]

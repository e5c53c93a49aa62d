"""Arrays made by other people's implementations (../shared/oracles), in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

ORACLES = Path(__file__).parents[4] / "shared" / "oracles"

with_oracles = pytest.mark.skipif(not ORACLES.is_dir(), reason=f"no oracle arrays in {ORACLES}")


def arrays(name: str, *keys: str) -> list[Tensor]:
    with np.load(ORACLES / f"{name}.npz") as file:
        return [torch.from_numpy(file[key]) for key in keys]


def assert_equal(actual: Tensor, expected: Tensor, relative: float = 1e-9) -> None:
    torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=relative, atol=relative)


def heads(x: Tensor, count: int = 2) -> Tensor:
    """(B, N, H d) -> (B, H, N, d)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """(B, H, N, d) -> (B, N, H d)."""
    return x.transpose(1, 2).flatten(2)

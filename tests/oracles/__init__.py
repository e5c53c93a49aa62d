"""Arrays made by other people's implementations (README.md), in float64, and how ours are compared with them."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parent

KEPT = slice(None, None, 5)
"""Tokens whose outputs are here: prime to all chunks and windows, it meets every place of them."""


def arrays(name: str, *keys: str) -> list[Tensor]:
    """The arrays with these keys; where two files have the same, one names the other's, `file:key`."""
    found = []
    with np.load(FOLDER / f"{name}.npz") as file:
        for key in keys:
            value = file[key]
            found += arrays(*str(value).split(":")) if value.dtype.kind == "U" else [torch.from_numpy(value)]
    return found


def every_array(name: str) -> dict[str, Tensor]:
    """All arrays of a file by key."""
    with np.load(FOLDER / f"{name}.npz") as file:
        keys = file.files
    return dict(zip(keys, arrays(name, *keys)))


def assert_equal(actual: Tensor, expected: Tensor, relative: float = 1e-9) -> None:
    """Of the same shape, or `expected` at KEPT tokens of (..., N, d)."""
    if actual.shape != expected.shape:
        actual = actual[..., KEPT, :]
    torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=relative, atol=relative)


def heads(x: Tensor, count: int = 2) -> Tensor:
    """(B, N, H d) -> (B, H, N, d)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """(B, H, N, d) -> (B, N, H d)."""
    return x.transpose(1, 2).flatten(2)

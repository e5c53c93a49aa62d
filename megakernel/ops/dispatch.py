"""Which implementation of an op runs, and the dtype it sums in."""

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

VARIABLE = "MEGAKERNEL_BACKEND"
DEFAULT = "chunked"

Implementation = TypeVar("Implementation", bound=Callable)


def choose(implementations: Mapping[str, Implementation], backend: str | None) -> Implementation:
    """The implementation named by `backend`, else by the environment's MEGAKERNEL_BACKEND, else the default."""
    name = backend or os.environ.get(VARIABLE) or DEFAULT
    if name not in implementations:
        source = "backend" if backend else VARIABLE
        raise ValueError(f"{source}={name!r}: expected one of {', '.join(implementations)}")
    return implementations[name]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of features, weights, sums and states: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)

"""The dtype of sums, and tuples of tensors, some of which may be absent."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

Tensors = tuple[Any, ...]
"""Tensors, or None for an absent optional one."""


def split(tensors: Sequence[Any], *sizes: int) -> list[Tensors]:
    """Tensors in consecutive parts of these sizes, and the rest."""
    rest = iter(tensors)
    return [*(tuple(islice(rest, size)) for size in sizes), tuple(rest)]


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of features, weights, sums and states: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)

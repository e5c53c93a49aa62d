"""What a query meets in EVA without causality."""

from typing import NamedTuple

import torch
from torch import Tensor


class Windows(NamedTuple):
    """M windows of w queries and of W keys each."""

    keys: Tensor
    """(B, H, M, W, d)"""

    values: Tensor
    """(B, H, M, W, D)"""

    real: Tensor
    """(B or 1, M, W) bool: which keys exist."""

    queries: int
    """w"""


class Chunks(NamedTuple):
    """C summaries."""

    keys: Tensor
    """(B, H, C, d): k_c."""

    values: Tensor
    """(B, H, C, D): beta_c."""

    seen: Tensor
    """(B or 1, M, C) bool: the queries of a window see this chunk."""


def by_query(x: Tensor, window: int, count: int) -> Tensor:
    """(B, M, ...) -> (B, N, ...): the row of each query's window."""
    return x[:, torch.arange(count, device=x.device) // window]

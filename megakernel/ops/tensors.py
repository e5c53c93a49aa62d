"""Tuples of tensors, some of which may be absent."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

Tensors = tuple[Any, ...]
"""Tensors, or None for an absent optional one."""


def split(tensors: Sequence[Any], *sizes: int) -> list[Tensors]:
    """Tensors in consecutive parts of these sizes, and the rest."""
    rest = iter(tensors)
    return [*(tuple(islice(rest, size)) for size in sizes), tuple(rest)]

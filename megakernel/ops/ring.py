"""Tensors of context-parallel shards that pass from neighbor to neighbor, and gradients that follow them home."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor


class PendingTensors(Protocol):
    """Tensors in flight."""

    def wait(self) -> tuple[Tensor, ...]:
        """The left neighbor's tensors, with the shapes and dtypes of those sent."""
        ...


class Ring(Protocol):
    """Shard `rank` of `size` equal contiguous shards of every sequence, between two neighbors."""

    rank: int
    size: int

    def start_rotation(self, tensors: tuple[Tensor, ...]) -> PendingTensors:
        """Start sending tensors to the next shard, and from the last to the first; not differentiable."""
        ...


def visits(ring: Ring | None, own: tuple[Tensor, ...]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """The rank and the tensors of every shard, this one first; None: a whole sequence, which is shard 0.

    Tensors have the same shapes and dtypes on all shards. The next shard's are in flight while the caller uses one's.
    """
    rank, size = (0, 1) if ring is None else (ring.rank, ring.size)
    current = own
    for hop in range(size):
        pending = ring.start_rotation(current) if ring is not None and hop < size - 1 else None
        yield (rank - hop) % size, current
        if pending is not None:
            current = pending.wait()


class FollowingGradients:
    """Gradients of tensors that visit every shard: they follow one hop behind, and each shard adds its own."""

    def __init__(self, ring: Ring | None) -> None:
        self._ring = ring
        self._own: tuple[Tensor, ...] = ()
        self._pending: PendingTensors | None = None

    def add(self, gradients: tuple[Tensor, ...]) -> None:
        """Those of what `visits` has just yielded; changed in place."""
        if not self._own:
            self._own = gradients
            return
        assert self._ring is not None
        self._pending = self._ring.start_rotation(self._with_arrived(gradients))

    def returned(self) -> tuple[Tensor, ...]:
        """The sums over all shards of the gradients of this shard's tensors, after the last visit."""
        return self._with_arrived(self._own)

    def _with_arrived(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._pending is not None:
            for gradient, received in zip(gradients, self._pending.wait(), strict=True):
                gradient += received
        return gradients

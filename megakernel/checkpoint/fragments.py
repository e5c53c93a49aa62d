"""Fragments of tensors: what one rank holds of a tensor, and which elements two fragments share.

A checkpoint's files and the ranks of a run hold fragments of the same tensors: a tensor rank's shard, and with ZeRO a
range of its flattened shard. As boxes of the whole tensor, two fragments of any two layouts can be intersected, so a
rank reads of each file what it holds itself, and no whole tensor is put together on the way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.parallel.partition import Partition

_Ranges = tuple[range, ...]
"""One range along each dimension."""


@dataclass(frozen=True)
class Fragment:
    """What one rank holds of a tensor: a tensor rank's shard, or a range of the flattened shard."""

    partition: Partition
    """How the tensor is partitioned over tensor ranks."""

    rank: int = 0
    """The tensor rank."""

    size: int = 1
    """Number of tensor ranks."""

    flat: range | None = None
    """The range of the flattened shard; None: the shard, with its shape."""

    def narrowed(self, flat: range) -> "Fragment":
        """A range of the flattened shard."""
        return replace(self, flat=flat)

    def of(self, whole: Tensor) -> Tensor:
        """The fragment of a tensor: a view if possible; one dimension if `flat` is set."""
        shard = self.partition.shard(whole, self.rank, self.size)
        return shard if self.flat is None else shard.reshape(-1)[self.flat.start : self.flat.stop]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Shape of the fragment of a tensor with shape `whole`."""
        return self._shard_shape(whole) if self.flat is None else (len(self.flat),)

    def _shard_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        dimension = self.partition.dimension
        lengths = [len(part) for part, _ in self._runs(whole)]
        return tuple(sum(lengths) if i == dimension else n for i, n in enumerate(whole))

    def _runs(self, whole: Sequence[int]) -> tuple[tuple[range, int], ...]:
        dimension = self.partition.dimension
        return () if dimension is None else _runs(self.partition, self.rank, self.size, whole[dimension])

    def boxes(self, whole: Sequence[int]) -> Iterator["_Box"]:
        """The boxes of a tensor with shape `whole` that make up the fragment.

        A range of a matrix is at most three: the end of a row, whole rows, and the beginning of a row.
        """
        shape = self._shard_shape(whole)
        flat = range(prod(shape)) if self.flat is None else self.flat
        strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        dimension = self.partition.dimension
        for ranges in _boxes_of_range(shape, flat.start, flat.stop):
            if dimension is None:
                yield _Box.at(ranges, ranges, strides, flat.start)
                continue
            for part, first in self._runs(whole):
                shared = _overlap(ranges[dimension], range(first, first + len(part)))
                if shared:
                    held = (*ranges[:dimension], shared, *ranges[dimension + 1 :])
                    moved = range(shared.start - first + part.start, shared.stop - first + part.start)
                    yield _Box.at(
                        (*ranges[:dimension], moved, *ranges[dimension + 1 :]), held, strides, flat.start
                    )

    def shared_with(self, other: "Fragment", whole: Sequence[int]) -> list["Shared"]:
        """The boxes of a tensor with shape `whole` that are in both fragments."""
        pairs = product(self.boxes(whole), other.boxes(whole))
        return [shared for pair in pairs if (shared := Shared.between(*pair)) is not None]


WHOLE = Fragment(Partition(None))
"""The whole tensor."""


class _Box(NamedTuple):
    """A box of a tensor, and where a flat fragment has it."""

    ranges: _Ranges
    """In the whole tensor."""

    strides: tuple[int, ...]
    """In elements of the fragment."""

    offset: int
    """Place of the first element in the fragment."""

    @classmethod
    def at(cls, ranges: _Ranges, held: _Ranges, strides: tuple[int, ...], start: int) -> "_Box":
        """The box that a shard with `strides` has at `held`, in a fragment that begins at element `start` of it."""
        return cls(
            ranges, strides, sum(r.start * stride for r, stride in zip(held, strides, strict=True)) - start
        )

    def first(self, ranges: _Ranges) -> int:
        """Place of the first element of `ranges`, which the box contains."""
        inside = (r.start - own.start for r, own in zip(ranges, self.ranges, strict=True))
        return self.offset + sum(n * stride for n, stride in zip(inside, self.strides, strict=True))

    def view(self, flat: Tensor, ranges: _Ranges) -> Tensor:
        """The elements at `ranges`, which the box contains, of a fragment of one dimension."""
        lengths = [len(r) for r in ranges]
        return flat.as_strided(lengths, self.strides, flat.storage_offset() + self.first(ranges))


class Shared(NamedTuple):
    """A box of a tensor that two fragments have."""

    ranges: _Ranges
    of_target: _Box
    of_source: _Box

    @classmethod
    def between(cls, target: _Box, source: _Box) -> "Shared | None":
        """The overlap of two boxes; None if there is none."""
        ranges = tuple(map(_overlap, target.ranges, source.ranges))
        return cls(ranges, target, source) if all(ranges) else None

    @property
    def source_span(self) -> range:
        """The shortest range of the source that has its elements."""
        first = self.of_source.first(self.ranges)
        steps = zip(self.ranges, self.of_source.strides, strict=True)
        return range(first, first + sum((len(r) - 1) * stride for r, stride in steps) + 1)

    def of(self, source: Tensor) -> Tensor:
        """Its elements of the source: a view of a contiguous tensor with one dimension."""
        return self.of_source.view(source, self.ranges)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy its elements from one fragment to the other; both are contiguous and have one dimension."""
        self.of_target.view(target, self.ranges).copy_(self.of(source))


def _overlap(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))


def _boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[_Ranges]:
    """The boxes that make up elements start, ..., stop - 1 of a tensor, in order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        yield from _boxes_in_row(shape, first, start % row, stop - first * row)
        return
    if start % row:
        yield from _boxes_in_row(shape, first, start % row, row)
        first += 1
    if first < stop // row:
        yield (range(first, stop // row), *map(range, shape[1:]))
    if stop % row:
        yield from _boxes_in_row(shape, last, 0, stop % row)


def _boxes_in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[_Ranges]:
    return ((range(row, row + 1), *rest) for rest in _boxes_of_range(shape[1:], start, stop))


@cache
def _runs(partition: Partition, rank: int, size: int, length: int) -> tuple[tuple[range, int], ...]:
    """The parts of a partitioned dimension that a tensor rank has, each with its place along the shard's dimension."""
    indices = replace(partition, dimension=0).shard(torch.arange(length), rank, size)
    starts = (indices.diff() != 1).nonzero().flatten() + 1
    parts = [part for part in torch.tensor_split(indices, starts.tolist()) if len(part)]
    places = accumulate(map(len, parts), initial=0)
    return tuple((range(int(part[0]), int(part[-1]) + 1), place) for part, place in zip(parts, places))

"""Which heads of a layer a module holds, and the random numbers of each head."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Seed = int | tuple[int, ...]
"""What random numbers depend on beside the head: the run's seed and the layer, never a rank."""


def _own(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class HeadShard:
    """Shard `rank` of `size` equal contiguous shards of the heads of a layer."""

    rank: int = 0
    size: int = 1

    shared: Callable[[Tensor], Tensor] = _own
    """Applied to a parameter that all heads share before it is used. A tensor parallel layer passes the
    function that is the identity forward and sums gradients over the shards backward."""

    def of(self, count: int, name: str) -> range:
        """The heads of this shard among `count`; ValueError if they do not divide."""
        if count % self.size:
            raise ValueError(
                f"{name}={count} does not divide over {self.size} shards of heads; change one of them"
            )
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)


ALL_HEADS = HeadShard()


def generator(seed: Seed, *place: int | str) -> torch.Generator:
    """The random numbers of one place in a layer, a head first of all: the same on every shard and machine."""
    key = (*(seed if isinstance(seed, tuple) else (seed,)), *place)
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))

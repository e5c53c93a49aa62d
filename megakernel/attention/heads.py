"""Which heads of a layer a module holds, and the random numbers of each head."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megakernel.config.parallel import SoftmaxExchange

Seed = int | tuple[int, ...]
"""What random numbers depend on besides the head: the run's seed and the layer, never a rank."""


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


@dataclass(frozen=True)
class LayerSettings:
    """What an attention layer is besides its mechanism."""

    num_heads: int
    """Query heads of the whole layer, over all shards."""

    num_kv_heads: int
    """Key/value heads of the whole layer."""

    head_dim: int
    """Width d of a head."""

    causal: bool = True
    """Whether a token sees only itself and earlier tokens."""

    max_positions: int | None = None
    """Tokens of the longest sequence, which linformer's matrices have a column for."""

    seed: Seed = 0
    """What random matrices depend on besides the head, usually (run seed, layer)."""

    heads: HeadShard = ALL_HEADS
    """The shard of the layer's heads that the module holds; its parameters are slices of the whole layer's."""

    softmax_exchange: SoftmaxExchange = "auto"
    """How full softmax meets the keys of other shards: `heads` trades tokens for heads, which must divide over the
    shards, `ring` passes keys and values round, `auto` is heads where they divide."""

    @property
    def query_heads(self) -> range:
        """Those of this shard."""
        return self.heads.of(self.num_heads, "num_heads")

    @property
    def kv_heads(self) -> range:
        """Those of this shard."""
        return self.heads.of(self.num_kv_heads, "num_kv_heads")


def generator(seed: Seed, *place: int | str) -> torch.Generator:
    """The random numbers of one place in a layer, a head first of all: the same on every shard and machine."""
    key = (*(seed if isinstance(seed, tuple) else (seed,)), *place)
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))

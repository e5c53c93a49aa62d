"""The heads of a layer that a module holds, and the random generator of each head."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megakernel.config.parallel import SoftmaxExchange

Seed = int | tuple[int, ...]
"""What random numbers depend on, besides the head: the run's seed and the layer, never a rank."""


def _identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class HeadShard:
    """Shard `rank` of a layer's heads, which are divided into `size` equal contiguous shards."""

    rank: int = 0
    size: int = 1

    shared: Callable[[Tensor], Tensor] = _identity
    """Applied to parameters that all heads share before they are used. Tensor-parallel layers pass a function that is
    the identity in forward and sums gradients over the shards in backward."""

    copied: Callable[[Tensor], Tensor] | None = None
    """The same for parameters of a key head that several shards hold, which it sums over these; None: none does."""

    def of_key_head(self, parameter: Tensor) -> Tensor:
        """`parameter`, which key heads own, as every use of it has to take it: its gradient is that of all copies."""
        return parameter if self.copied is None else self.copied(parameter)

    def of(self, count: int, name: str) -> range:
        """The heads of this shard among `count`; ValueError if they do not divide."""
        if count % self.size:
            raise ValueError(
                f"{name}={count} does not divide over {self.size} shards of heads; change one of them"
            )
        local = count // self.size
        return range(self.rank * local, (self.rank + 1) * local)

    def of_keys(self, count: int) -> range:
        """The key heads of this shard among `count`: with fewer than shards one, as its neighbours with `copied`."""
        if self.copied is None or self.size % count:
            return self.of(count, "num_kv_heads")
        head = self.rank * count // self.size
        return range(head, head + 1)


ALL_HEADS = HeadShard()


@dataclass(frozen=True)
class LayerSettings:
    """The settings of an attention layer besides its mechanism."""

    num_heads: int
    """Query heads of the whole layer, over all shards."""

    num_kv_heads: int
    """Key/value heads of the whole layer."""

    head_dim: int
    """Width d of a head."""

    causal: bool = True
    """Whether a token attends only to itself and earlier tokens."""

    max_positions: int | None = None
    """Tokens of the longest sequence: the number of columns of Linformer's matrices."""

    seed: Seed = 0
    """What random matrices depend on, besides the head: usually (run seed, layer)."""

    heads: HeadShard = ALL_HEADS
    """The shard of the layer's heads that the module holds; its parameters are slices of the whole layer's."""

    softmax_exchange: SoftmaxExchange = "auto"
    """How full softmax reaches the keys of other shards: `heads` is the Ulysses all-to-all and needs heads that divide
    over the shards, `ring` is ring attention, `auto` takes `heads` where they divide."""

    rotary: bool = True
    """Whether queries and keys are rotated. False: positions come from elsewhere, such as a table added to the
    embedding, and layers that rotate between their landmarks and their window need no `AttentionInputs.rotary`."""

    @property
    def query_heads(self) -> range:
        """Query heads of this shard."""
        return self.heads.of(self.num_heads, "num_heads")

    @property
    def kv_heads(self) -> range:
        """Key/value heads of this shard."""
        return self.heads.of_keys(self.num_kv_heads)


def generator(seed: Seed, *labels: int | str) -> torch.Generator:
    """A generator seeded by `seed` and `labels`, first of all a head; the same on every shard and machine."""
    key = (*(seed if isinstance(seed, tuple) else (seed,)), *labels)
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))

"""The protocol by which attention layers communicate with the other context-parallel shards.

A layer holds N consecutive tokens of each sequence. `ContextParallelShard` gives it what it needs of the others:
`megakernel.parallel` implements it over a process group, `WHOLE_SEQUENCE` is the unsharded case. `Ulysses` exchanges a
shard of all heads for whole sequences of some heads.
"""

from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.ring import PendingTensors
from megakernel.ops.state import KernelState, PendingState


class ContextParallelShard:
    """Shard `rank` of `size` equal contiguous shards of every sequence; this base class is the unsharded sequence.

    Methods that only a sharded sequence needs are not implemented here.
    """

    rank: int = 0
    size: int = 1

    def previous_tokens(self, x: Tensor, count: int) -> Tensor:
        """The last `count` tokens (dimension -2) of the previous shard; zeros on rank 0.

        x: (..., N, d), count <= N; returns (..., count, d). Differentiable: gradients go back to the tokens' rank.
        """
        raise NotImplementedError

    def start_prefix(self, state: KernelState, carries: Tensor) -> PendingState:
        """Start an exclusive prefix scan of `state` over the shards.

        state: the sum over this shard's tokens. carries: (B,) bool, whether the incoming state also leaves the shard
        (False if a document starts inside), or (B, H_kv), its decay factor. `wait()` returns the incoming state: the
        `merge` (megakernel.ops.state) of the states of all earlier shards that reach this one, each times the factors
        of the shards between; the empty state on rank 0.
        """
        raise NotImplementedError

    def start_suffix(self, state: KernelState, carries: Tensor) -> PendingState:
        """Start the reverse of `start_prefix`: an exclusive suffix scan over later shards."""
        raise NotImplementedError

    def start_rotation(self, tensors: tuple[Tensor, ...]) -> PendingTensors:
        """Start sending `tensors` to the next shard, and from the last shard to the first.

        `wait()` returns those of the previous shard, with the same shapes and dtypes; until then neither may be
        changed. Not differentiable: the caller rotates gradients itself.
        """
        raise NotImplementedError

    def all_reduce(self, x: Tensor) -> Tensor:
        """All-reduce: the sum of `x` over the shards; its gradient is all-reduced too."""
        return x

    def all_tokens(self, x: Tensor) -> Tensor:
        """All-gather: (..., n, d) of this shard -> (..., size * n, d) of all shards in order; differentiable."""
        return x

    def tokens_to_heads(self, x: Tensor) -> Tensor:
        """Ulysses all-to-all: (B, H, N, d), all heads of this shard -> (B, H / size, N * size, d), all tokens."""
        return x

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        """The inverse of `tokens_to_heads`."""
        return x


WHOLE_SEQUENCE = ContextParallelShard()
"""The unsharded sequence."""


class Ulysses:
    """The Ulysses all-to-all over P shards: N tokens of H heads -> all P N tokens of H / P heads.

    A no-op if P = 1. If key heads do not divide over the shards, they are first repeated for their query heads.
    """

    def __init__(self, cp_shard: ContextParallelShard, num_heads: int, num_kv_heads: int):
        """num_heads, num_kv_heads: those of this rank before the exchange. ValueError if num_heads does not divide."""
        if num_heads % cp_shard.size:
            raise ValueError(
                f"{num_heads} heads do not divide over {cp_shard.size} shards of the sequence; change one"
            )
        self.cp_shard = cp_shard
        self.repeats = 1 if num_kv_heads % cp_shard.size == 0 else num_heads // num_kv_heads
        local = num_heads // cp_shard.size
        self.query_heads = slice(cp_shard.rank * local, (cp_shard.rank + 1) * local)
        """The query heads of this shard after the exchange, to select other per-head tensors."""

    def exchange_queries(self, q: Tensor) -> Tensor:
        """(B, H, N, d) -> (B, H / P, P N, d)."""
        return self.cp_shard.tokens_to_heads(q)

    def exchange_keys(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Keys or values (B, H_kv, N, d) or (B, H_kv, M, N, d) -> all tokens of the key heads of `exchange_queries`."""
        return tuple(self._exchange(self._repeated(x, 1)) for x in tensors)

    def select_key_heads(self, x: Tensor, dim: int = 0) -> Tensor:
        """A tensor of all key heads (dimension `dim`), equal on all shards -> the key heads of `exchange_queries`."""
        return self._repeated(x, dim).chunk(self.cp_shard.size, dim)[self.cp_shard.rank]

    def whole_positions(self, positions: Positions, tokens: int) -> Positions:
        """Positions (B, N) of this shard, or of the first of its `tokens` -> positions of the whole sequences."""
        if isinstance(positions, int):
            return positions - self.cp_shard.rank * tokens
        return self.cp_shard.all_tokens(positions[..., None])[..., 0]

    def restore(self, out: Tensor) -> Tensor:
        """The inverse of `exchange_queries`: this shard's tokens of all heads."""
        return self.cp_shard.heads_to_tokens(out)

    def _repeated(self, x: Tensor, dim: int) -> Tensor:
        return x if self.repeats == 1 else x.repeat_interleave(self.repeats, dim)

    def _exchange(self, x: Tensor) -> Tensor:
        return self.cp_shard.tokens_to_heads(x.flatten(1, -3)).unflatten(1, (-1, *x.shape[2:-2]))

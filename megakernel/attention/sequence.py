"""My shard of the sequence: the one thing an attention layer knows about sequence sharding.

A layer holds N consecutive tokens of each sequence. `ContextParallelShard` lets it ask for what lies before them
without knowing of processes: `parallel/` answers over a process group, `WHOLE` answers for a layer that holds
everything. `Ulysses` has whole sequences of some heads in place of a shard of the sequences of all heads.
"""

from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.softmax_attention.ring import PendingTensors
from megakernel.ops.state import KernelState, PendingState


class ContextParallelShard:
    """Shard `rank` of `size` equal contiguous shards of every sequence; by itself the one shard that is the whole.

    What lies before a shard, or behind it, is asked of parts of a sequence alone.
    """

    rank: int = 0
    size: int = 1

    def previous_tokens(self, x: Tensor, count: int) -> Tensor:
        """The `count` tokens (dimension -2) before this shard: the left neighbour's last, zeros on rank 0.

        x is (..., N, d) with count <= N; the result (..., count, d). Differentiable: gradients travel back to
        the rank that owns the tokens.
        """
        raise NotImplementedError

    def start_prefix(self, state: KernelState, carries: Tensor) -> PendingState:
        """Begin the exclusive prefix of `state` over the shards.

        state: what this shard's tokens add to the state that leaves it. carries: (B,) bool, whether what
        entered the shard also leaves it (False where a document starts inside), or (B, H_kv), the factor by which a
        state that decays does. `wait()` gives what enters: the `merge` (megakernel.ops.state) of the states of earlier
        shards s, without those where a shard between s and this one does not carry; the empty state on rank 0.
        """
        raise NotImplementedError

    def start_suffix(self, state: KernelState, carries: Tensor) -> PendingState:
        """`start_prefix` read backwards: what later shards' tokens add to what enters this one from behind."""
        raise NotImplementedError

    def start_rotation(self, tensors: tuple[Tensor, ...]) -> PendingTensors:
        """Begin to hand `tensors` to the shard after this one, the last shard to the first.

        `wait()` gives those of the shard before, of the same shapes and dtypes; until then neither may be changed.
        Not differentiable: what rotates in backward is the caller's to say.
        """
        raise NotImplementedError

    def total(self, x: Tensor) -> Tensor:
        """The sum of `x` over the shards, on each of them; its gradient is the sum of theirs."""
        return x

    def all_tokens(self, x: Tensor) -> Tensor:
        """(..., n, d) of mine -> (..., size * n, d) of all shards in order; differentiable."""
        return x

    def tokens_to_heads(self, x: Tensor) -> Tensor:
        """(B, H, N, d) my tokens of all heads -> (B, H / size, N * size, d) all tokens of my heads (Ulysses)."""
        return x

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        """The inverse of `tokens_to_heads`."""
        return x


WHOLE = ContextParallelShard()
"""The shard of a layer that holds every token."""


class Ulysses:
    """What P shards of N tokens and H heads trade tokens for heads for: all P N tokens of H / P heads (Ulysses).

    The shard that is the whole sequence keeps everything as it is. Key heads that do not divide over the shards are
    repeated for their queries first.
    """

    def __init__(self, cp_shard: ContextParallelShard, num_heads: int, num_kv_heads: int):
        """num_heads and num_kv_heads: those of this process's tokens; ValueError where num_heads does not divide."""
        if num_heads % cp_shard.size:
            raise ValueError(
                f"{num_heads} heads do not divide over {cp_shard.size} shards of the sequence; change one"
            )
        self.cp_shard = cp_shard
        self.repeats = 1 if num_kv_heads % cp_shard.size == 0 else num_heads // num_kv_heads
        each = num_heads // cp_shard.size
        self.query_heads = slice(cp_shard.rank * each, (cp_shard.rank + 1) * each)
        """Which of the query heads are this shard's, for what else belongs to a head."""

    def of_queries(self, q: Tensor) -> Tensor:
        """(B, H, N, d) -> (B, H / P, P N, d)."""
        return self.cp_shard.tokens_to_heads(q)

    def of_keys(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Keys or values (B, H_kv, N, d), or (B, H_kv, M, N, d), -> all tokens of the heads that the queries need."""
        return tuple(self._traded(self._for_queries(x, 1)) for x in tensors)

    def of_key_heads(self, x: Tensor, dim: int = 0) -> Tensor:
        """What every shard holds for all key heads, counted by `dim` -> that of the heads that the queries need."""
        return self._for_queries(x, dim).chunk(self.cp_shard.size, dim)[self.cp_shard.rank]

    def of_positions(self, positions: Positions, tokens: int) -> Positions:
        """Positions (B, N), or that of the first of a shard's `tokens`, -> those of the whole sequences."""
        if isinstance(positions, int):
            return positions - self.cp_shard.rank * tokens
        return self.cp_shard.all_tokens(positions[..., None])[..., 0]

    def cut(self, out: Tensor) -> Tensor:
        """The inverse of `of_queries`: this shard's tokens of all heads."""
        return self.cp_shard.heads_to_tokens(out)

    def _for_queries(self, x: Tensor, dim: int) -> Tensor:
        return x if self.repeats == 1 else x.repeat_interleave(self.repeats, dim)

    def _traded(self, x: Tensor) -> Tensor:
        return self.cp_shard.tokens_to_heads(x.flatten(1, -3)).unflatten(1, (-1, *x.shape[2:-2]))

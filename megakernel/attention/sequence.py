"""My shard of the sequence: the one thing an attention layer knows about sequence sharding.

A layer holds N consecutive tokens of each row. `ContextParallelShard` lets it ask for what lies before them without
knowing of processes: `parallel/` answers over a process group, `WHOLE` answers for a layer that holds
everything. `Ulysses` has whole rows of some heads in place of a shard of the rows of all heads.
"""

from typing import Generic, Protocol, TypeVar

from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.softmax_attention.ring import PendingTensors
from megakernel.ops.state import KernelState, PendingState, empty_state

Result = TypeVar("Result")


class ContextParallelShard(Protocol):
    """Shard `rank` of `size` equal contiguous shards of every row."""

    rank: int
    size: int

    def previous_tokens(self, x: Tensor, count: int) -> Tensor:
        """The `count` tokens (dimension -2) before this shard: the left neighbour's last, zeros on rank 0.

        x is (..., N, d) with count <= N; the result (..., count, d). Differentiable: gradients travel back to
        the rank that owns the tokens.
        """
        ...

    def start_prefix(self, state: KernelState, carries: Tensor) -> PendingState:
        """Begin the exclusive prefix of `state` over the shards.

        state: what this shard's tokens add to the state that leaves it. carries: (B,) bool, whether what
        entered the shard also leaves it (False where a document starts inside), or (B, H_kv), the factor by which a
        state that decays does. `wait()` gives what enters:
        the `merge` (megakernel.ops.state) of the states of earlier shards s, without those where a shard
        between s and this one does not carry; the empty state on rank 0.
        """
        ...

    def start_suffix(self, state: KernelState, carries: Tensor) -> PendingState:
        """`start_prefix` read backwards: what later shards' tokens add to what enters this one from behind."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """The sum of `x` over the shards, on each of them; its gradient is the sum of theirs."""
        ...

    def all_tokens(self, x: Tensor) -> Tensor:
        """(..., n, d) of mine -> (..., size * n, d) of all shards in order; differentiable."""
        ...

    def tokens_to_heads(self, x: Tensor) -> Tensor:
        """(B, H, N, d) my tokens of all heads -> (B, H / size, N * size, d) all tokens of my heads (Ulysses)."""
        ...

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        """The inverse of `tokens_to_heads`."""
        ...

    def start_rotation(self, tensors: tuple[Tensor, ...]) -> PendingTensors:
        """Begin to hand `tensors` to the shard after this one, the last shard to the first.

        `wait()` gives those of the shard before, of the same shapes and dtypes; until then neither may be changed.
        Not differentiable: what rotates in backward is the caller's to say.
        """
        ...


class Arrived(Generic[Result]):
    """The result of an exchange that is over."""

    def __init__(self, result: Result):
        self._result = result

    def wait(self) -> Result:
        """The result, at once."""
        return self._result


class WholeSequence:
    """The shard of a layer that holds every token."""

    rank = 0
    size = 1

    def previous_tokens(self, x: Tensor, count: int) -> Tensor:
        """Zeros: nothing lies before the whole sequence."""
        return x.new_zeros(*x.shape[:-2], count, x.shape[-1])

    def start_prefix(self, state: KernelState, carries: Tensor) -> PendingState:
        """The empty state: nothing enters the whole sequence."""
        return Arrived(empty_state(state))

    def start_suffix(self, state: KernelState, carries: Tensor) -> PendingState:
        """The empty state: nothing lies behind the whole sequence."""
        return Arrived(empty_state(state))

    def total(self, x: Tensor) -> Tensor:
        """Mine is all there is."""
        return x

    def all_tokens(self, x: Tensor) -> Tensor:
        """Mine are all there are."""
        return x

    def tokens_to_heads(self, x: Tensor) -> Tensor:
        """All heads are mine already."""
        return x

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        """All tokens are mine already."""
        return x

    def start_rotation(self, tensors: tuple[Tensor, ...]) -> PendingTensors:
        """My neighbour is myself."""
        return Arrived(tensors)


WHOLE = WholeSequence()


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
        """Positions (B, N), or that of the first of a shard's `tokens`, -> those of the whole rows."""
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

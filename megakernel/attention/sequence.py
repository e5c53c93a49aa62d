"""My shard of the sequence: the one thing an attention layer knows about sequence sharding.

A layer holds N consecutive tokens of each row. `ContextParallelShard` lets it ask for what lies before them without
knowing of processes: `parallel/` answers over a process group, `WHOLE` answers for a layer that holds
everything.
"""

from typing import Protocol

from torch import Tensor

from megakernel.ops.softmax_attention.ring import PendingTensors
from megakernel.ops.state import KernelState, PendingState, empty_state


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


class _Nothing:
    def __init__(self, state: KernelState):
        self.state = state

    def wait(self) -> KernelState:
        return empty_state(self.state)


class _Same:
    def __init__(self, tensors: tuple[Tensor, ...]):
        self.tensors = tensors

    def wait(self) -> tuple[Tensor, ...]:
        return self.tensors


class WholeSequence:
    """The shard of a layer that holds every token."""

    rank = 0
    size = 1

    def previous_tokens(self, x: Tensor, count: int) -> Tensor:
        """Zeros: nothing lies before the whole sequence."""
        return x.new_zeros(*x.shape[:-2], count, x.shape[-1])

    def start_prefix(self, state: KernelState, carries: Tensor) -> PendingState:
        """The empty state: nothing enters the whole sequence."""
        return _Nothing(state)

    def start_suffix(self, state: KernelState, carries: Tensor) -> PendingState:
        """The empty state: nothing lies behind the whole sequence."""
        return _Nothing(state)

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
        return _Same(tensors)


WHOLE = WholeSequence()

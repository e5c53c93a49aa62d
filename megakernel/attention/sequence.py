"""My piece of the sequence: the one thing an attention layer knows about sequence sharding.

A layer holds N consecutive tokens of each row. `SequencePiece` lets it ask for what lies before them without
knowing of processes: `parallel/` answers over a process group, `WHOLE` answers for a layer that holds everything.
"""

from typing import Protocol

from torch import Tensor


class PendingState(Protocol):
    """A state exchange under way; the local work goes between its start and `wait`."""

    def wait(self) -> Tensor:
        """The state that enters this piece, shape and dtype of the state handed in; differentiable."""
        ...


class SequencePiece(Protocol):
    """Piece `rank` of `size` equal contiguous pieces of every row."""

    rank: int
    size: int

    def previous_tokens(self, x: Tensor, count: int) -> Tensor:
        """The `count` tokens (dimension -2) before this piece: the left neighbour's last ones, zeros on rank 0.

        x is (..., N, d) with count <= N; the result (..., count, d). Differentiable: gradients travel back to the
        rank that owns the tokens.
        """
        ...

    def start_prefix(self, state: Tensor, carries: Tensor) -> PendingState:
        """Begin the exclusive prefix of `state` over the pieces.

        state: (B, H, F, D) what this piece's tokens add to the state that leaves it. carries: (B,) bool, whether what
        entered the piece also leaves it (False where a document starts inside). `wait()` gives what enters:
        sum over earlier pieces s of state_s, each multiplied by the carries of the pieces between s and this one.
        """
        ...

    def tokens_to_heads(self, x: Tensor) -> Tensor:
        """(B, H, N, d) with my tokens of all heads -> (B, H / size, N * size, d) with all tokens of my heads (Ulysses)."""
        ...

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        """The inverse of `tokens_to_heads`."""
        ...


class _Done:
    def __init__(self, state: Tensor):
        self.state = state

    def wait(self) -> Tensor:
        return self.state


class WholeSequence:
    """The piece of a layer that holds every token."""

    rank = 0
    size = 1

    def previous_tokens(self, x: Tensor, count: int) -> Tensor:
        """Zeros: nothing lies before the whole sequence."""
        return x.new_zeros(*x.shape[:-2], count, x.shape[-1])

    def start_prefix(self, state: Tensor, carries: Tensor) -> PendingState:
        """Zeros: nothing enters the whole sequence."""
        return _Done(state.new_zeros(state.shape))

    def tokens_to_heads(self, x: Tensor) -> Tensor:
        """All heads are mine already."""
        return x

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        """All tokens are mine already."""
        return x


WHOLE = WholeSequence()

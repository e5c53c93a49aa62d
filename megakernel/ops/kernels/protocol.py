"""What an op gives to the engine: its tensors by name, and launches of its kernels in four steps.

Forward: `write` sums the keys of each segment, the engine scans the sums into the states that enter segments, and
`read` computes outputs. Backward: `bwd_read` computes the gradients of queries, `sum_queries` what the queries of each
segment add to the gradient of the state that enters it, the engine scans these sums from right to left, and `bwd_write`
computes the gradients of keys.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from megakernel.ops.kernels.arguments import Queries, SequenceInfo, State
from megakernel.ops.kernels.launcher import Launcher


class QueryTensors(Protocol):
    """The named tensors of an op that belong to queries, a NamedTuple; others than q may be None."""

    @property
    def q(self) -> Tensor:
        """(B, H, N, d)"""

    def __iter__(self) -> Iterator[Any]:
        """All of them."""


class KeyTensors(Protocol):
    """The named tensors of an op that belong to keys, a NamedTuple; others than k and v may be None."""

    @property
    def k(self) -> Tensor:
        """(B, H_kv, N, d)"""

    @property
    def v(self) -> Tensor:
        """(B, H_kv, N, D)"""

    @property
    def projection(self) -> Tensor | None:
        """(M, d) or (H_kv, M, d), of the feature map"""

    @property
    def log_decay(self) -> Tensor | None:
        """(B, H_kv, N) of the states"""

    def __iter__(self) -> Iterator[Any]:
        """All of them."""


class Saved(NamedTuple):
    """What the backward pass over queries takes from forward."""

    outputs: Any
    """From `Launches.read`."""

    keys: Any
    """From `Launches.write`."""

    state: State
    """The states that queries read."""


class QueryBackward(NamedTuple):
    """Results of the backward pass over queries, used by the pass over keys."""

    queries: Queries
    grads: Any
    """Gradients of the tensors of queries, by the same names."""

    projection_grad: Callable[[], Tensor] | None
    """Computes (and caches) the queries' part of the projection's gradient; None if that is not needed."""

    op_saved: Any = None
    """Other inputs of the op's `bwd_write`."""

    finish_dq: Callable[[], None] | None = None
    """Launches that complete the gradient of q, of a `bwd_read` that has left some to them."""


class StateGradients(NamedTuple):
    """A state, and the gradients of its sums and normalizers."""

    state: State
    grads: tuple[Tensor, Tensor]

    def scale_grad(self) -> Tensor:
        """(B, H_kv): the gradient of the state's log scale."""
        (sums, norms), (of_sums, of_norms) = self.state[:2], self.grads
        return (sums * of_sums).sum((2, 3)) + (norms * of_norms).sum(2)


class StatesBackward(NamedTuple):
    """What the backward pass over keys takes from that over states."""

    of_queries: State
    """The states of queries."""

    scale_grads: Tensor | None
    """From `Launcher.pass_states`, for decaying states; None if outputs have no gradient."""

    last: StateGradients | None
    """Of the outgoing state; None if that is unused."""

    first: StateGradients | None
    """Of the entering state; None without one."""

    @property
    def of_entering(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the log scales of the states that enter segments, and of the one that enters the sequence."""
        return self.scale_grads, None if self.first is None else self.first.scale_grad()


class Launches(Protocol):
    """An op's launches for one call, built from its options, the queries q and the tensors of keys."""

    @property
    def launcher(self) -> Launcher:
        """The sizes of the launches over keys."""

    @property
    def seq(self) -> SequenceInfo:
        """The sequences."""

    def write(self) -> tuple[State, Any]:
        """The sums over the keys of each segment, and tensors of keys to save for backward."""

    def read_ahead(self, queries: Any, saved: Any) -> Any:
        """Part of `read` that needs no state, for launches while it is exchanged; None if the op has no such part."""

    def read(self, queries: Any, saved: Any, state: State, ahead: Any = None) -> Any:
        """The output `out`, and other tensors to save.

        queries: the op's tensors of queries; saved: from `write`; ahead: from `read_ahead`.
        """

    def bwd_read(
        self,
        do: Tensor,
        queries: Any,
        saved: Saved,
        dq: Tensor,
        needs_projection: bool,
        *,
        exchanges: bool = False,
    ) -> QueryBackward:
        """Gradients of queries. dq: a buffer for that of q. needs_projection: whether the projection needs one, too.

        exchanges: leave to `finish_dq` what `sum_queries` does not need, for launches while states are exchanged.
        """

    def sum_queries(self, queries: Queries, length: int) -> State:
        """What each segment's queries add to the gradient of the state that enters it, over `length` tokens."""

    def bwd_write(
        self, query_backward: QueryBackward, saved: Any, states: StatesBackward, dk: Tensor, dv: Tensor
    ) -> Any:
        """Gradients of the tensors of keys, by the same names. saved: from `write`. dk, dv: buffers for two of them."""

    def key_buffers(self) -> Any:
        """Buffers for what `write` saves."""

    def output_buffers(self, queries: Any) -> Any:
        """Buffers for what `read` returns."""


class Op(NamedTuple):
    """An op: the types of its tensors and options, which are NamedTuples, and its launches."""

    queries: Any
    """`QueryTensors`"""

    keys: Any
    """`KeyTensors`"""

    options: Any
    """Strings, integers and bools, with `feature_map` and `components` (`launcher.MapOptions`)."""

    outputs: Any
    """What `Launches.read` returns."""

    saved: Any
    """What `Launches.write` saves."""

    launches: Callable[[Any, Tensor, Any], Launches]
    """(options, q, tensors of keys) -> launches"""

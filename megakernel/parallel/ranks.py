"""Work done by several processes together, where a failure of one must reach all."""

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from megakernel.config import UserError

if TYPE_CHECKING:
    from . import Mesh

T = TypeVar("T")


class RankFailed(OSError):
    """Work that every rank took part in failed on at least one of them; raised alike on all."""


class Ranks:
    """This process among those of the run.

    rank: mine, of `size`.
    exchange: a collective that takes one picklable value of each rank and gives all of them in rank order,
    such as torch.distributed.all_gather_object; it is the barrier too. A single process needs none.
    broadcast: a collective that gives every rank the value of rank 0, and is the barrier too. Without it `exchange`
    does that, which takes as much memory as if every rank had such a value.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        exchange: Callable[[Any], list[Any]] = lambda value: [value],
        broadcast: Callable[[Any], Any] | None = None,
    ):
        self.rank = rank
        self.size = size
        self._exchange = exchange
        self._broadcast = broadcast or (lambda value: exchange(value)[0])

    @classmethod
    def of(cls, mesh: "Mesh") -> "Ranks":
        """All processes of a mesh."""
        return cls(mesh.rank, mesh.world_size, mesh.gather_objects, mesh.broadcast_object)

    def first(self, action: Callable[[], T]) -> T:
        """Let rank 0 act; its result, or its ValueError or OSError, is every rank's."""
        result: Any = None
        if self.rank == 0:
            try:
                result = action()
            except (ValueError, OSError) as error:
                result = error
        result = self._broadcast(result)
        if isinstance(result, Exception):
            raise result
        return result

    def alike(self, action: Callable[[], T]) -> T:
        """Let every rank act on what is its own; the result, or the UserError of the first rank that has one.

        The action's collectives, if any, must all be done when a rank raises.
        """
        result: Any = None
        refusal = None
        try:
            result = action()
        except UserError as error:
            refusal = str(error)
        refusals = [text for text in self._exchange(refusal) if text is not None]
        if refusals:
            raise UserError(refusals[0])
        return result

    def all(self, action: Callable[[], T]) -> list[T]:
        """Let every rank act; the results in rank order. If any fails, all raise RankFailed with the first failure.

        The action must come back on every rank: one that waits inside for a rank that has failed never does.
        """
        result: Any = None
        failure = None
        try:
            result = action()
        except Exception as error:
            text = " ".join(str(error).split())
            failure = f"{socket.gethostname()}: {type(error).__name__}: {text}"
        results, failures = zip(*self._exchange((result, failure)))
        failed = [f"rank {rank} on {text}" for rank, text in enumerate(failures) if text is not None]
        if failed:
            more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise RankFailed(failed[0] + more)
        return list(results)

"""Work that several processes do together, in which a failure of one is raised on all."""

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from megakernel.config import UserError

if TYPE_CHECKING:
    from . import Mesh

T = TypeVar("T")


class RankFailed(OSError):
    """Collective work failed on at least one rank; raised on all ranks with the same message."""


class Ranks:
    """This process among the processes of the run.

    rank, size: of this process.
    exchange: a collective that returns the picklable values of all ranks in rank order, such as
    torch.distributed.all_gather_object; also the barrier. A single process needs none.
    broadcast: a collective that returns the value of rank 0 on every rank; also a barrier. None: `exchange`, which
    takes as much memory as if every rank had such a value.
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

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 alone, and return its result or raise its ValueError or OSError on every rank."""
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

    def each(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank and return its result, or raise the first rank's UserError on all ranks.

        The action must raise only after all of its collectives, if it has any.
        """
        result: Any = None
        message = None
        try:
            result = action()
        except UserError as error:
            message = str(error)
        messages = [text for text in self._exchange(message) if text is not None]
        if messages:
            raise UserError(messages[0])
        return result

    def all(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; results in rank order. If any fails, all raise RankFailed with the first failure.

        The action must return or raise on every rank; it must not wait for a rank that may have failed.
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

"""The progress of a process, to find out which ranks the others wait for when a run hangs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """How far a process is; written by the training thread, read by others at any time."""

    step: int = 0
    """Completed optimizer steps."""

    events: int = 0
    """Phases and exchanges begun so far."""

    place: str = "start"
    """The current phase or exchange, the last one begun."""

    waits: bool = False
    """Whether the process waits there for others."""

    def begin(self, place: str) -> None:
        """Record the beginning of a phase or exchange."""
        self.events += 1
        self.place = place

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """Mark the process as waiting for others at `place`."""
        self.begin(place)
        self.waits = True
        yield
        self.waits = False

    def snapshot(self) -> dict[str, Any]:
        """The fields as a dict for JSON."""
        return asdict(self)


def laggards(progress_by_rank: Mapping[int, Progress]) -> list[int]:
    """The ranks that the others wait for. progress_by_rank: rank -> progress.

    Those with the fewest completed steps; among these, those that are not waiting, if any; among these, those with the
    fewest events. All ranks if they do not differ.
    """
    steps = min(progress.step for progress in progress_by_rank.values())
    late = {rank: progress for rank, progress in progress_by_rank.items() if progress.step == steps}
    working = {rank: progress for rank, progress in late.items() if not progress.waits} or late
    events = min(progress.events for progress in working.values())
    return [rank for rank, progress in working.items() if progress.events == events]

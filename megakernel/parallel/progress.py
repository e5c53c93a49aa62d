"""How far a process is, for those who wonder why it does not go on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """Written by the thread that trains, read by others at any time."""

    step: int = 0
    """Optimizer steps behind it."""

    events: int = 0
    """Phases and exchanges begun so far."""

    place: str = "start"
    """The last of them."""

    waits: bool = False
    """Whether it waits for other processes there."""

    def reach(self, place: str) -> None:
        """A phase or an exchange begins."""
        self.events += 1
        self.place = place

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """Around a wait for other processes."""
        self.reach(place)
        self.waits = True
        yield
        self.waits = False

    def snapshot(self) -> dict[str, Any]:
        """Its numbers, as JSON takes them."""
        return asdict(self)


def laggards(everywhere: Mapping[int, Progress]) -> list[int]:
    """The ranks that the others wait for: rank -> how far it is.

    Those with the fewest steps behind them; of these the ones that wait for nobody, if there are such, and of these
    the ones that have begun least. All of them where nothing tells them apart.
    """
    steps = min(progress.step for progress in everywhere.values())
    late = {rank: progress for rank, progress in everywhere.items() if progress.step == steps}
    working = {rank: progress for rank, progress in late.items() if not progress.waits} or late
    events = min(progress.events for progress in working.values())
    return [rank for rank, progress in working.items() if progress.events == events]

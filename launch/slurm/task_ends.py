"""How a run's processes ended, read off what srun saw, in the order in which it saw it."""

import re
import signal
from dataclasses import dataclass

_END = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<ranks>[\d,-]+): (?P<how>.+)")
_EXITED = re.compile(r"Exited with exit code (\d+)")
_PATIENCE_ENDED = "srun: First task exited"
"""From there on srun itself ends what has not left, and that is no cause of anything."""

_SIGNALS = {signal.strsignal(number): int(number) for number in signal.Signals}


@dataclass(frozen=True)
class TaskEnds:
    """The ends that came before srun lost its patience."""

    status: int
    """The largest exit status, 128 + N for signal N; that of srun where all processes left by themselves."""

    death: str | None
    """Which process a signal ended first, and where; None where none was."""


def task_ends(srun_stderr: str, status: int) -> TaskEnds:
    """Read what srun wrote; status: its own exit status."""
    seen, _, killed_by_srun = srun_stderr.partition(_PATIENCE_ENDED)
    ends = [(match, _status(match["how"])) for match in _END.finditer(seen)]
    largest = max((code for _, code in ends), default=status)
    deaths = [match for match, _ in ends if _EXITED.match(match["how"]) is None]
    first = f"rank {deaths[0]['ranks']} on {deaths[0]['node']}: {deaths[0]['how']}" if deaths else None
    return TaskEnds(largest if killed_by_srun else status, first)


def _status(how: str) -> int:
    exited = _EXITED.match(how)
    if exited is not None:
        return int(exited[1])
    return 128 + _SIGNALS.get(how.partition(" (core dumped)")[0], 0)

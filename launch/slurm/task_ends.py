"""How a run's processes ended, read off what srun saw, in the order in which it saw it."""

import re
import signal
from dataclasses import dataclass

from launch.exit_status import ExitStatus

_END = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<ranks>[\d,-]+): (?P<how>.+)")
_EXITED = re.compile(r"Exited with exit code (\d+)")
_KERNEL_SAID = "Out Of Memory"
"""Of a process in a control group that the kernel has killed; srun itself then exits with 1."""

_OVER_LIMIT = re.compile(
    r"slurmstepd-?(?P<node>\S*): error: StepId=\S+ exceeded memory limit \((?P<used>\d+) > (?P<limit>\d+)\)"
)
"""Where Slurm itself measures memory (OverMemoryKill), and kills the processes of all nodes for it."""

_PATIENCE_ENDED = "srun: First task exited"
"""From there on srun itself ends what has not left, and that is no cause of anything."""

_SIGNALS = {signal.strsignal(number): int(number) for number in signal.Signals}


@dataclass(frozen=True)
class TaskEnds:
    """The ends that came before srun lost its patience."""

    status: int
    """The largest exit status, 128 + N for signal N; that of srun where all processes left by themselves."""

    death: str | None
    """Which process a signal ended first, and where, or which node had no memory left; None where none did."""


def task_ends(srun_stderr: str, status: int, step_stderr: str = "") -> TaskEnds:
    """Read what srun wrote; status: its own exit status; step_stderr: what Slurm wrote into the processes' own logs."""
    seen, _, killed_by_srun = srun_stderr.partition(_PATIENCE_ENDED)
    over = _OVER_LIMIT.search(step_stderr)
    if over is not None:
        used, limit = int(over["used"]) >> 20, int(over["limit"]) >> 20
        return TaskEnds(ExitStatus.OUT_OF_MEMORY, f"{over['node']}: {used} MiB of {limit} MiB".lstrip(": "))
    ends = [(match, _status(match["how"])) for match in _END.finditer(seen)]
    largest = max((code for _, code in ends), default=status)
    deaths = [match for match, _ in ends if _EXITED.match(match["how"]) is None]
    first = f"rank {deaths[0]['ranks']} on {deaths[0]['node']}: {deaths[0]['how']}" if deaths else None
    if any(match["how"] == _KERNEL_SAID for match in deaths):
        return TaskEnds(ExitStatus.OUT_OF_MEMORY, first)
    return TaskEnds(largest if killed_by_srun else status, first)


def _status(how: str) -> int:
    exited = _EXITED.match(how)
    if exited is not None:
        return int(exited[1])
    return 128 + _SIGNALS.get(how.partition(" (core dumped)")[0], 0)

"""How the processes of a job ended, by what srun saw, and whether the job goes back into the queue."""

import re
import signal
from collections.abc import Sequence
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
    ends = [(match, _status_of(match["how"])) for match in _END.finditer(seen)]
    largest = max((code for _, code in ends), default=status)
    deaths = [match for match, _ in ends if _EXITED.match(match["how"]) is None]
    first = f"rank {deaths[0]['ranks']} on {deaths[0]['node']}: {deaths[0]['how']}" if deaths else None
    if any(match["how"] == _KERNEL_SAID for match in deaths):
        return TaskEnds(ExitStatus.OUT_OF_MEMORY, first)
    return TaskEnds(largest if killed_by_srun else status, first)


def _status_of(how: str) -> int:
    exited = _EXITED.match(how)
    if exited is not None:
        return int(exited[1])
    return 128 + _SIGNALS.get(how.partition(" (core dumped)")[0], 0)


STANDSTILL = 2
"""Restarts in a row without a step saved, after which another would not help either."""

_AGAIN = (
    ExitStatus.STOPPED,
    ExitStatus.STALLED,
    ExitStatus.UNFIT,
    ExitStatus.OUT_OF_MEMORY,
    ExitStatus.IN_USE,
)


@dataclass(frozen=True)
class Decision:
    """What becomes of the job."""

    restart: bool

    why: str
    """How the processes ended, and what speaks against a restart where one was due."""


def decide(
    status: int, restarts: int, max_restarts: int, saved: Sequence[int], said: str | None = None
) -> Decision:
    """Decide after the processes have left.

    status: of srun, the largest of all processes'. restarts: how often the job has been started again; max_restarts:
    how often it may be, 0 where it must not. saved: steps behind the newest checkpoint at the end of every start so
    far, this one last. said: what whoever failed said about it.
    """
    plain = _end(status)
    asked = status in (ExitStatus.DONE, ExitStatus.STOPPED, ExitStatus.TERMINATED)
    why = plain if said is None or asked else f"{plain} ({said})"
    if not _is_interruption(status):
        return Decision(False, why)
    if max_restarts == 0:
        return Decision(False, f"{why}; it is not to be requeued")
    if restarts >= max_restarts:
        return Decision(
            False, f"{why}; it has been restarted {restarts} times and may be {max_restarts} times"
        )
    if len(saved) > STANDSTILL and len(set(saved[-STANDSTILL - 1 :])) == 1:
        return Decision(False, f"{why}; {STANDSTILL} restarts in a row saved nothing beyond step {saved[-1]}")
    return Decision(True, why)


def _is_interruption(status: int) -> bool:
    """What befalls a sound run: a request to make room, a step that stands still, a process that is killed, or one of
    an earlier start, on a node that Slurm has lost, that may still be writing.

    Memory that runs out may have been filled slowly; where it is too small from the beginning, restarts save nothing.
    """
    return status in _AGAIN or (status > 128 and status != ExitStatus.TERMINATED)


def _end(status: int) -> str:
    plain = {
        ExitStatus.DONE: "done",
        ExitStatus.FAILED: "failed",
        ExitStatus.USAGE: "refused its command line or configuration",
        ExitStatus.STOPPED: "saved and stopped to make room",
        ExitStatus.STALLED: "a step made no progress",
        ExitStatus.UNFIT: "a node is not fit",
        ExitStatus.OUT_OF_MEMORY: "ran out of memory, of which --mem gives more",
        ExitStatus.NOT_FINITE: "the loss or its gradients stayed non-finite",
        ExitStatus.IN_USE: "another process writes into the run's folder",
        ExitStatus.TERMINATED: "ended on request",
    }
    if status in list(ExitStatus):
        return plain.get(ExitStatus(status), "failed")
    if status == 128 + signal.SIGKILL:
        return "a process was killed, which is also what happens when memory runs out"
    if status > 128 and status - 128 in list(signal.Signals):
        return f"a process was ended by {signal.Signals(status - 128).name}"
    return f"failed with exit status {status}"

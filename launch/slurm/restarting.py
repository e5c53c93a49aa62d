"""Whether a job whose processes have left goes back into the queue."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from launch.exit_status import ExitStatus

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

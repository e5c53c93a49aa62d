"""Whether a job whose processes have left goes back into the queue.

A request to make room (preemption, a time limit) costs nothing. What fails costs one of `max_restarts`, and a start
that has saved a step gives all of them back: a run of weeks may lose any number of nodes, one at a time. What the
network, a node or a GPU did may happen to any run. An error of another kind is tried again where the run had been
getting on, once: the same error at the same step is the run's own.
"""

import re
import signal
from collections.abc import Container, Sequence
from dataclasses import dataclass

from launch.exit_status import ExitStatus

STANDSTILL = 2
"""Restarts in a row without a step saved, after which another would not give a process the memory that it lacks."""

_REQUESTS = (ExitStatus.DONE, ExitStatus.STOPPED, ExitStatus.TERMINATED)
_THE_RUNS_OWN = (ExitStatus.DONE, ExitStatus.USAGE, ExitStatus.NOT_FINITE, ExitStatus.TERMINATED)
_INFRASTRUCTURE = (ExitStatus.STALLED, ExitStatus.UNFIT, ExitStatus.IN_USE)

_OF_INFRASTRUCTURE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|timed out|no route to host|network is unreachable"
    r"|transport endpoint|stale file handle|input/output error|remote i/o error"
    r"|nccl (remote|system|internal) error|nccl.*(timeout|watchdog)|\bxid\b|uncorrectable|ecc error"
    r"|fallen off the bus|unspecified launch failure|cuda error: (unknown error|system|mps|hardware)",
    re.IGNORECASE,
)
"""What libraries and the kernel say of a node, a GPU, a network or a file system that has failed."""


@dataclass(frozen=True)
class Start:
    """How one start of a job ended."""

    status: int
    """Of srun, the largest of all processes'."""

    progressed: bool
    """Whether it has saved a step beyond those that were there."""


@dataclass(frozen=True)
class Decision:
    """What becomes of the job."""

    restart: bool

    why: str
    """How the processes ended, and what speaks against a restart where one was due."""


def decide(
    starts: Sequence[Start], max_restarts: int, said: str | None = None, restart_on: Container[int] = ()
) -> Decision:
    """Decide after the processes have left.

    starts: all of the job so far, this one last. max_restarts: failures in a row, without a step saved, after which
    it may start again; 0 where it must not start again at all. said: what whoever failed said about it. restart_on:
    further exit statuses of which the user says that they are not the run's fault.
    """
    status, progressed = starts[-1].status, starts[-1].progressed
    plain = _end(status)
    why = plain if said is None or status in _REQUESTS else f"{plain} ({said})"
    chosen = status in restart_on
    if status in _THE_RUNS_OWN and not chosen:
        return Decision(False, why)
    of_infrastructure = (
        chosen or status in _INFRASTRUCTURE or _OF_INFRASTRUCTURE.search(said or "") is not None
    )
    for_memory = status in (ExitStatus.OUT_OF_MEMORY, 128 + signal.SIGKILL)
    if not (status == ExitStatus.STOPPED or of_infrastructure or status > 128 or for_memory or progressed):
        return Decision(False, why)
    if max_restarts == 0:
        return Decision(False, f"{why}; it is not to be requeued")
    failures = _failures_in_a_row(starts)
    if failures > (most := min(max_restarts, STANDSTILL) if for_memory else max_restarts):
        return Decision(False, f"{why}; {most} restarts in a row saved no step")
    return Decision(True, why)


def _failures_in_a_row(starts: Sequence[Start]) -> int:
    """Ends since the last one that had saved a step, those on request left out."""
    failures = 0
    for start in reversed(starts):
        if start.progressed:
            break
        failures += start.status not in _REQUESTS
    return failures


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

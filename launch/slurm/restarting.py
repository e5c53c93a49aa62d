"""How the processes of a job ended, by what srun saw, and whether the job goes back into the queue.

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

_END = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<ranks>[\d,-]+): (?P<how>.+)")
_EXITED = re.compile(r"Exited with exit code (\d+)")
_KERNEL_SAID = "Out Of Memory"
"""srun's word for a process that the kernel has killed in its control group; srun then exits with 1."""

_OVER_LIMIT = re.compile(
    r"slurmstepd-?(?P<node>\S*): error: StepId=\S+ exceeded memory limit \((?P<used>\d+) > (?P<limit>\d+)\)"
)
"""Where Slurm itself measures memory (OverMemoryKill), and kills the processes of all nodes for it."""

_PATIENCE_ENDED = "srun: First task exited"
"""From there on srun itself ends what has not left, and that is no cause of anything."""

_OF_SLURM = re.compile(
    r"srun: error: (tasks? \S+ launch failed: .+|Unable to create step .+|Node failure on .+)"
)
"""Where not all processes could be started, or Slurm has given up a node; srun itself may exit with 0 then."""

SILENT_NODE = "srun: error: Timed out waiting for job step to complete"
"""Where a node does not say that its processes have ended: it is gone, or they cannot be killed."""

GOES_ON = 91
"""Exit status of `attempt end` that tells the script to start the run again at once on the nodes that are left."""

FAILED_NODE = "srun: error: Node failure on"
"""Where Slurm has given up a node of a job that goes on without it."""

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
    of_slurm = _OF_SLURM.search(seen)
    if of_slurm is not None:
        return TaskEnds(status or ExitStatus.FAILED, of_slurm[1])
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


ENDED_ON_REQUEST = "ended on request"

STANDSTILL = 2
"""Restarts in a row without a step saved, after which another would not give a process the memory that it lacks."""

_REQUESTS = (ExitStatus.DONE, ExitStatus.STOPPED, ExitStatus.TERMINATED)
_THE_RUNS_OWN = (ExitStatus.DONE, ExitStatus.USAGE, ExitStatus.NOT_FINITE, ExitStatus.TERMINATED)
_INFRASTRUCTURE = (ExitStatus.STALLED, ExitStatus.UNFIT, ExitStatus.IN_USE)

_OF_INFRASTRUCTURE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|timed out|no route to host|network is unreachable"
    r"|transport endpoint|stale file handle|input/output error|remote i/o error"
    r"|nccl (remote|system|internal) error|nccl.*(timeout|watchdog)|\bxid\b|uncorrectable|ecc error"
    r"|fallen off the bus|unspecified launch failure|node failure|cuda error: (unknown error|system|mps|hardware)",
    re.IGNORECASE,
)
"""Messages of libraries and the kernel about a failed node, GPU, network or file system."""


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
        ExitStatus.TERMINATED: ENDED_ON_REQUEST,
    }
    if status in list(ExitStatus):
        return plain.get(ExitStatus(status), "failed")
    if status == 128 + signal.SIGKILL:
        return "a process was killed, which is also what happens when memory runs out"
    if status > 128 and status - 128 in list(signal.Signals):
        return f"a process was ended by {signal.Signals(status - 128).name}"
    return f"failed with exit status {status}"

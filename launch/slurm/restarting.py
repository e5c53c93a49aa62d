"""How the processes of a job ended, by the messages of srun, and whether the job is requeued.

A request to stop (preemption, a time limit) costs nothing. A failure costs one of `max_restarts`, and a start that
saved a step resets the count: a run of weeks may lose any number of nodes, one at a time. Failures of the network, a
node or a GPU can happen to any run and are retried. After any other error the job restarts only if this start saved a
step: the same error at the same step is the run's own.
"""

import re
import signal
from collections.abc import Container, Sequence
from dataclasses import dataclass

from launch.exit_status import ExitStatus

_TASK_END = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<ranks>[\d,-]+): (?P<how>.+)")
_EXITED = re.compile(r"Exited with exit code (\d+)")
_KILLED_BY_KERNEL = "Out Of Memory"
"""srun's message about a process that the kernel killed in its control group; srun then exits with 1."""

_OVER_LIMIT = re.compile(
    r"slurmstepd-?(?P<node>\S*): error: StepId=\S+ exceeded memory limit \((?P<used>\d+) > (?P<limit>\d+)\)"
)
"""Message when Slurm itself measures memory (OverMemoryKill), and kills the processes of all nodes."""

_SRUN_ENDS_TASKS = "srun: First task exited"
"""After this message srun ends the remaining processes itself, so that later ends are no cause."""

_SLURM_FAILURE = re.compile(
    r"srun: error: (tasks? \S+ launch failed: .+|Unable to create step .+|Node failure on .+)"
)
"""Messages when processes could not be started, or Slurm has given up a node; srun itself may then exit with 0."""

SILENT_NODE = "srun: error: Timed out waiting for job step to complete"
"""Message when a node does not report the end of its processes: it is gone, or they cannot be killed."""

RESTART_IN_JOB = 91
"""Exit status of `attempt end` that makes the script restart the run at once on the remaining nodes."""

FAILED_NODE = "srun: error: Node failure on"
"""Message when Slurm has given up a node of a job that continues without it."""

_SIGNALS = {signal.strsignal(number): int(number) for number in signal.Signals}


@dataclass(frozen=True)
class TaskEnds:
    """How processes ended, not counting those that srun ended itself."""

    status: int
    """The largest exit status, 128 + N for signal N; that of srun if it ended no process itself."""

    death: str | None
    """First process ended by a signal (rank, node), node that ran out of memory, or Slurm's own failure; else None."""


def task_ends(srun_stderr: str, status: int, step_stderr: str = "") -> TaskEnds:
    """Parse srun's messages. status: its exit status. step_stderr: Slurm's messages in the logs of the processes."""
    causes, _, killed_by_srun = srun_stderr.partition(_SRUN_ENDS_TASKS)
    match = _OVER_LIMIT.search(step_stderr)
    if match is not None:
        used, limit = int(match["used"]) >> 20, int(match["limit"]) >> 20
        return TaskEnds(ExitStatus.OUT_OF_MEMORY, f"{match['node']}: {used} MiB of {limit} MiB".lstrip(": "))
    slurm_failure = _SLURM_FAILURE.search(causes)
    if slurm_failure is not None:
        return TaskEnds(status or ExitStatus.FAILED, slurm_failure[1])
    ends = [(match, _status_of(match["how"])) for match in _TASK_END.finditer(causes)]
    largest = max((code for _, code in ends), default=status)
    deaths = [match for match, _ in ends if _EXITED.match(match["how"]) is None]
    first = f"rank {deaths[0]['ranks']} on {deaths[0]['node']}: {deaths[0]['how']}" if deaths else None
    if any(match["how"] == _KILLED_BY_KERNEL for match in deaths):
        return TaskEnds(ExitStatus.OUT_OF_MEMORY, first)
    return TaskEnds(largest if killed_by_srun else status, first)


def _status_of(how: str) -> int:
    exited = _EXITED.match(how)
    if exited is not None:
        return int(exited[1])
    return 128 + _SIGNALS.get(how.partition(" (core dumped)")[0], 0)


ENDED_ON_REQUEST = "ended on request"

MAX_MEMORY_RESTARTS = 2
"""Most restarts in a row without a saved step after running out of memory: more would fail in the same way."""

_REQUESTS = (ExitStatus.DONE, ExitStatus.STOPPED, ExitStatus.TERMINATED)
_NEVER_RETRIED = (
    ExitStatus.DONE,
    ExitStatus.USAGE,
    ExitStatus.NOT_FINITE,
    ExitStatus.NOT_PREPARED,
    ExitStatus.TERMINATED,
)
_INFRASTRUCTURE = (ExitStatus.STALLED, ExitStatus.UNFIT, ExitStatus.IN_USE)

_INFRASTRUCTURE_ERROR = re.compile(
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
    """`TaskEnds.status`."""

    progressed: bool
    """Whether it saved a later step than the starts before."""


@dataclass(frozen=True)
class Decision:
    """Whether the job restarts."""

    restart: bool

    why: str
    """How the processes ended, and why a job that could restart does not."""


def decide(
    starts: Sequence[Start], max_restarts: int, error_text: str | None = None, restart_on: Container[int] = ()
) -> Decision:
    """Decide whether the job restarts after its processes have ended.

    starts: all starts of the job, this one last. max_restarts: most failures in a row without a saved step after
    which it restarts; 0: never restart. error_text: what the failed process or node reported. restart_on: further
    exit statuses that the user declares not to be the run's fault.
    """
    status, progressed = starts[-1].status, starts[-1].progressed
    why = describe(status)
    if error_text is not None and status not in _REQUESTS:
        why = f"{why} ({error_text})"
    by_user = status in restart_on
    if status in _NEVER_RETRIED and not by_user:
        return Decision(False, why)
    of_infrastructure = (
        by_user or status in _INFRASTRUCTURE or _INFRASTRUCTURE_ERROR.search(error_text or "") is not None
    )
    for_memory = status in (ExitStatus.OUT_OF_MEMORY, 128 + signal.SIGKILL)
    if not (status == ExitStatus.STOPPED or of_infrastructure or status > 128 or for_memory or progressed):
        return Decision(False, why)
    if max_restarts == 0:
        return Decision(False, f"{why}; requeuing is off")
    failures = _failures_in_a_row(starts)
    if failures > (most := min(max_restarts, MAX_MEMORY_RESTARTS) if for_memory else max_restarts):
        return Decision(False, f"{why}; {most} restarts in a row saved no step")
    return Decision(True, why)


def _failures_in_a_row(starts: Sequence[Start]) -> int:
    """Starts since the last one that saved a step, without those that ended on request."""
    failures = 0
    for start in reversed(starts):
        if start.progressed:
            break
        failures += start.status not in _REQUESTS
    return failures


def describe(status: int) -> str:
    """How processes with this exit status ended."""
    descriptions = {
        ExitStatus.DONE: "done",
        ExitStatus.FAILED: "failed",
        ExitStatus.USAGE: "refused its command line or configuration",
        ExitStatus.STOPPED: "saved and stopped to make room",
        ExitStatus.STALLED: "a step made no progress",
        ExitStatus.UNFIT: "a node is not fit",
        ExitStatus.OUT_OF_MEMORY: "ran out of memory, which --mem can raise",
        ExitStatus.NOT_FINITE: "the loss or its gradients stayed non-finite",
        ExitStatus.NOT_PREPARED: "the data could not be verified or indexed",
        ExitStatus.IN_USE: "another process writes into the run's folder",
        ExitStatus.TERMINATED: ENDED_ON_REQUEST,
    }
    if status in list(ExitStatus):
        return descriptions.get(ExitStatus(status), "failed")
    if status == 128 + signal.SIGKILL:
        return "a process was killed, which is also what happens when memory runs out"
    if status > 128 and status - 128 in list(signal.Signals):
        return f"a process was ended by {signal.Signals(status - 128).name}"
    return f"failed with exit status {status}"

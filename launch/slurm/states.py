"""Where jobs stand, by whoever still knows: the queue, accounting, the list of completed jobs."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from .programs import ask, call

_QUEUE = "%i|%T|%r|%N|%S|%D|%P|%L"
"""Job, state, reason, nodes, start, number of nodes, partition, time left."""

_LIVE = {
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
    "STAGE_OUT",
    "RESIZING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
}
"""States that a job leaves again. PREEMPTED is none: a preempted job that starts again is PENDING."""


@dataclass(frozen=True)
class JobState:
    """One job as Slurm sees it."""

    job: str
    """Id; of a member of an array ARRAY_INDEX."""

    state: str
    """Slurm's word for it, such as PENDING or RUNNING; UNKNOWN where nobody knows the job any more."""

    reason: str = ""
    """Why it waits, as Slurm says it."""

    nodes: str = ""
    """Nodes it runs on, or ran on."""

    start: str = ""
    """When it started or is expected to, in local time."""

    left: str = ""
    """Time left until its limit."""

    @property
    def is_live(self) -> bool:
        """It waits or runs, or will again."""
        return self.state in _LIVE

    @property
    def is_pending(self) -> bool:
        """It waits for its start."""
        return self.state in {"PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING"}


def job_states(jobs: Iterable[str]) -> dict[str, JobState]:
    """The states of jobs by id, those left out that Slurm knows no more.

    The queue is asked first: it knows live jobs, and finished ones for MinJobAge (300 s unless the cluster says
    otherwise). Then accounting, and where a cluster has none, its list of completed jobs.
    Raises SlurmRefused where Slurm cannot be reached.
    """
    wanted = list(dict.fromkeys(jobs))
    if not wanted:
        return {}
    known = {job: state for job, state in by_queue().items() if job in wanted}
    for source in (["sacct", "-X"], ["sacct", "-c"]):
        missing = [job for job in wanted if job not in known]
        if missing and shutil.which("sacct"):
            known |= {job: state for job, state in by_accounting(source, missing).items() if job in missing}
    return known


def by_queue() -> dict[str, JobState]:
    """This user's jobs that the queue knows."""
    # One question about all jobs of this user: with -j, an id that has left the queue makes squeue fail.
    out = ask("squeue", "--me", "--states=all", "--array", "--noheader", "-o", _QUEUE)
    found = {}
    for line in out.splitlines():
        job, state, reason, nodes, start, _, _, left = line.split("|")
        found[job] = JobState(job, state, _word(reason), nodes, _word(start), _word(left))
    return found


def by_accounting(source: list[str], jobs: list[str]) -> dict[str, JobState]:
    """Those of `jobs` that sacct knows; source: the command, for the database or for the list of completed jobs."""
    done = call([*source, "--noheader", "--parsable2", "-o", "JobID,State", "-j", ",".join(jobs)])
    found = {}
    # Without accounting it fails, and that is no news.
    for line in done.stdout.splitlines() if not done.returncode else ():
        job, state = line.split("|")
        if "." not in job and state:
            found[job] = JobState(job, state.split()[0])  # `CANCELLED by 1000`
    return found


def _word(text: str) -> str:
    return "" if text in ("None", "N/A", "(null)") else text

"""Where jobs stand, by whoever still knows: the queue, accounting, the list of completed jobs, the run's own record."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launch.arguments import RUNS
from launch.exit_status import ExitStatus
from launch.slurm_programs import SlurmRefused, ask, call
from megakernel.config import UserError

from .job_folder import Job, JobFolder, find_runs

_POLL_SECONDS = 1.0
_ASK_SECONDS = 5.0

_QUEUE = "%i|%T|%r|%N|%S"
"""Job, state, reason, nodes, start."""

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

    @property
    def is_live(self) -> bool:
        """It waits or runs, or will again."""
        return self.state in _LIVE

    @property
    def is_pending(self) -> bool:
        """It waits for its start."""
        return self.state in {"PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING"}


def known_to_slurm(runs: Iterable[JobFolder]) -> dict[str, JobState]:
    """The jobs of these runs that Slurm knows, asked once for all.

    The queue is asked first: it knows live jobs, and finished ones for MinJobAge (300 s unless the cluster says
    otherwise). Then accounting, and where a cluster has none, its list of completed jobs.
    Raises SlurmRefused where Slurm cannot be reached.
    """
    wanted = {
        job.id: run.submission(job.submission)
        for run in runs
        for job in run.jobs_if_readable()
        if job.executor == "slurm"
    }
    if not wanted:
        return {}
    known = {job: state for job, state in by_queue(_owners(wanted.values())).items() if job in wanted}
    for source in (["sacct", "-X"], ["sacct", "-c"]):
        missing = [job for job in wanted if job not in known]
        if missing and shutil.which("sacct"):
            known |= {job: state for job, state in by_accounting(source, missing).items() if job in wanted}
    return known


def _owners(submissions: Iterable[Path]) -> set[int]:
    """Who submitted: runs of several users may lie side by side, and one may go on with another's."""
    owners = {os.getuid()}
    for folder in submissions:
        with suppress(OSError):  # removed
            owners.add(folder.stat().st_uid)
    return owners


def states_of(run: JobFolder, known: Mapping[str, JobState] | None = None) -> dict[str, JobState]:
    """Every job of a run with its state, oldest first; where nobody knows it, what its events say.

    known: what Slurm has said of jobs; None asks it.
    """
    if known is None:
        known = known_to_slurm([run])
    return {job.id: _state(run, job, known) for job in run.jobs()}


def _state(run: JobFolder, job: Job, known: Mapping[str, JobState]) -> JobState:
    """Slurm's word, but of a job that was ended on request: there it is COMPLETED, for what waits for it."""
    state = known.get(job.id)
    if state is not None and state.state != "COMPLETED":
        return state
    recorded = _by_its_record(run, job)
    if state is None:
        return recorded
    return replace(state, state="CANCELLED") if recorded.state == "CANCELLED" else state


def refuse_live(runs: Sequence[JobFolder]) -> None:
    """Raise UserError where a job of one of these runs waits or runs; Slurm is asked once for all."""
    known = known_to_slurm(runs)
    for run in runs:
        live = [f"{job} {state.state}" for job, state in states_of(run, known).items() if state.is_live]
        if live:
            remedy = f"wait for it, megakernel cancel {run.path}, or choose another run.name"
            raise UserError(f"{run.path} has a live job ({', '.join(live)}); {remedy}")


def wait_until_ended(
    jobs: Mapping[JobFolder, Sequence[Job]], meanwhile: Callable[[], None]
) -> list[JobState]:
    """Call `meanwhile` every second until none of these jobs waits or runs; their states then.

    Slurm is asked every few seconds.
    """
    known: dict[str, JobState] = {}
    asked = -_ASK_SECONDS
    while True:
        if time.monotonic() - asked >= _ASK_SECONDS:
            asked, known = time.monotonic(), _asked_again(jobs, known)
        states = [_state(run, job, known) for run, some in jobs.items() for job in some]
        meanwhile()
        if not any(state.is_live for state in states):
            return states
        time.sleep(_POLL_SECONDS)


def _asked_again(runs: Iterable[JobFolder], known: dict[str, JobState]) -> dict[str, JobState]:
    """The states of their jobs; while Slurm does not answer those that were `known` before."""
    try:
        return known_to_slurm(runs)
    except SlurmRefused:
        if not known:
            raise
        return known


def _by_its_record(run: JobFolder, job: Job) -> JobState:
    """The state of a job that no program of Slurm knows: one of this machine, or one that ended long ago."""
    if job.executor != "slurm" and _runs_here(job.id, run.submission(job.submission)):
        return JobState(job.id, "RUNNING", nodes="this machine")
    ended = [event for event in run.events(job.id) if event["event"] in ("started", "ended", "cancelled")]
    if not ended or ended[-1]["event"] == "started":
        return JobState(job.id, "UNKNOWN" if job.executor == "slurm" else "FAILED")
    if ended[-1]["event"] == "cancelled" or ended[-1]["status"] == ExitStatus.TERMINATED:
        return JobState(job.id, "CANCELLED")
    return JobState(job.id, "FAILED" if ended[-1]["status"] else "COMPLETED")


def _runs_here(process: str, submission: Path) -> bool:
    """Whether that process is still the one of the submission: ids are given again."""
    try:
        return str(submission.absolute()).encode() in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def by_queue(users: Iterable[int]) -> dict[str, JobState]:
    """The jobs of users, by their numbers, that the queue knows."""
    # One question about all their jobs: with -j, an id that has left the queue makes squeue fail.
    named = ",".join(map(str, users))
    out = ask("squeue", f"--user={named}", "--states=all", "--array", "--noheader", "-o", _QUEUE)
    found = {}
    for line in out.splitlines():
        job, state, reason, nodes, start = line.split("|")
        found[job] = JobState(job, state, _word(reason), nodes, _word(start))
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


def with_jobs(dependency: str, root: Path = RUNS) -> str:
    """A dependency as sbatch takes it, in which runs were named where jobs belong: `afterok:pretrain` is afterok:17.

    A run stands for its last job. What has come true already is left out: Slurm soon forgets a job that has ended.
    Raises NotFound for a name that is no run, UserError where what is waited for can no longer happen.
    """
    parts = re.split("([,?])", dependency)
    kept: list[str] = []
    for between, part in zip(["", *parts[1::2]], parts[::2]):
        kind, *jobs = part.split(":")
        waits = [id for job in jobs for id in _awaited(kind, job, root)]
        if waits or not jobs:
            kept += [between, ":".join([kind, *waits])]
    return "".join(kept[1:])


_COMES_TRUE = {
    "afterok": ("COMPLETED",),
    "aftercorr": ("COMPLETED",),
    "afternotok": ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"),
}
"""Dependencies that only these ends fulfil; the others any end does."""


def _awaited(kind: str, job: str, root: Path) -> list[str]:
    if re.fullmatch(r"\d+(_\d+)?(\+\d+)?", job):
        return [job]
    waits = []
    runs = find_runs([job], root)
    known = known_to_slurm(runs)
    for run in runs:
        last = list(states_of(run, known).values())[-1]
        if last.is_live:
            waits.append(last.job)
        elif last.state not in _COMES_TRUE.get(kind, (last.state,)):
            raise UserError(
                f"--dependency {kind}:{job}: {run.path} has ended ({last.job} {last.state}); leave it out, or "
                f"megakernel resume {run.path}"
            )
    return waits

"""States of jobs, from the queue, accounting, the list of completed jobs, or the run's own events."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from launch.exit_status import ExitStatus
from launch.slurm_programs import SlurmRefused, call, check_output
from megakernel.config import UserError

from .job_folder import Job, JobFolder, find_runs

_POLL_SECONDS = 1.0
_QUERY_SECONDS = 5.0

_MOST_QUERIED = 5_000
"""Most jobs of one query to accounting: Linux limits the length of an argument to 128 KiB."""

_QUEUE = "%i|%T|%r|%N|%S"
"""squeue's format: job, state, reason, nodes, start."""

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
"""States that are not final. PREEMPTED is final: a preempted job that restarts is PENDING."""


@dataclass(frozen=True)
class JobState:
    """The state of one job."""

    job: str
    """Job id; ARRAY_INDEX for a member of an array."""

    state: str
    """Slurm's name of the state, such as PENDING or RUNNING; UNKNOWN if neither Slurm nor the run knows it."""

    reason: str = ""
    """Slurm's reason for a pending job."""

    nodes: str = ""
    """Nodes it runs on, or ran on."""

    start: str = ""
    """When it started or is expected to, in local time."""

    @property
    def is_live(self) -> bool:
        """Whether it waits or runs, or will again."""
        return self.state in _LIVE

    @property
    def is_pending(self) -> bool:
        """Whether it waits for its start."""
        return self.state in {"PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING"}


def query_slurm(runs: Iterable[JobFolder]) -> dict[str, JobState]:
    """Job id -> state of the jobs of these runs that Slurm knows, with few queries for all of them.

    The queue comes first: it has live jobs, and ended ones for MinJobAge (300 s by default). Accounting and the list
    of completed jobs are queried for the rest. Raises SlurmRefused if Slurm cannot be reached.
    """
    submissions = {
        job.id: run.submission(job.submission)
        for run in runs
        for job in run.jobs_if_readable()
        if job.executor == "slurm"
    }
    if not submissions:
        return {}
    queue = queue_states(_owners(submissions.values()))
    states = {job: state for job, state in queue.items() if job in submissions}
    for source in (["sacct", "-X"], ["sacct", "-c"]):
        missing = [job for job in submissions if job not in states] if shutil.which("sacct") else []
        for start in range(0, len(missing), _MOST_QUERIED):
            more = accounting_states(source, missing[start : start + _MOST_QUERIED])
            states |= {job: state for job, state in more.items() if job in submissions}
    return states


def _owners(submissions: Iterable[Path]) -> set[int]:
    """Ids of the users who submitted: a folder may have runs of several users, and a run may be resumed by another."""
    owners = {os.getuid()}
    for folder in submissions:
        with suppress(OSError):  # the submission was removed
            owners.add(folder.stat().st_uid)
    return owners


def job_states(run: JobFolder, by_slurm: Mapping[str, JobState]) -> dict[str, JobState]:
    """Job id -> state of every job of a run, oldest first; from the run's events if Slurm does not know the job."""
    return {job.id: _state(run, job, by_slurm) for job in run.jobs()}


def _state(run: JobFolder, job: Job, by_slurm: Mapping[str, JobState]) -> JobState:
    """Slurm's state, but CANCELLED for a job that ended on request, whose script returns 0 (`Attempt.finish_start`)."""
    state = by_slurm.get(job.id)
    if state is not None and state.state != "COMPLETED":
        return state
    recorded = _recorded_state(run, job)
    if state is None:
        return recorded
    return replace(state, state="CANCELLED") if recorded.state == "CANCELLED" else state


def refuse_live(runs: Sequence[JobFolder]) -> None:
    """Raise UserError if a job of one of these runs is live."""
    by_slurm = query_slurm(runs)
    for run in runs:
        live = [f"{job} {state.state}" for job, state in job_states(run, by_slurm).items() if state.is_live]
        if live:
            remedy = f"wait for it, megakernel cancel {run.path}, or choose another run.name"
            raise UserError(f"{run.path} has a live job ({', '.join(live)}); {remedy}")


def wait_until_ended(
    jobs: Mapping[JobFolder, Sequence[Job]], meanwhile: Callable[[], None]
) -> list[JobState]:
    """Call `meanwhile` every second until none of the jobs is live; return their final states.

    Slurm is queried every few seconds.
    """
    by_slurm: dict[str, JobState] = {}
    queried_at = -_QUERY_SECONDS
    while True:
        if time.monotonic() - queried_at >= _QUERY_SECONDS:
            queried_at, by_slurm = time.monotonic(), _requery(jobs, by_slurm)
        states = [_state(run, job, by_slurm) for run, of_run in jobs.items() for job in of_run]
        meanwhile()
        if not any(state.is_live for state in states):
            return states
        time.sleep(_POLL_SECONDS)


def _requery(runs: Iterable[JobFolder], previous: dict[str, JobState]) -> dict[str, JobState]:
    """Slurm's states of the runs' jobs; the previous ones while Slurm does not answer."""
    try:
        return query_slurm(runs)
    except SlurmRefused:
        if not previous:
            raise
        return previous


def _recorded_state(run: JobFolder, job: Job) -> JobState:
    """The state by the run's events of a job that Slurm does not know: a local one, or one that ended long ago."""
    if job.executor != "slurm" and _is_running(job.id, run.submission(job.submission)):
        return JobState(job.id, "RUNNING", nodes="this machine")
    phases = [event for event in run.events(job.id) if event["event"] in ("started", "ended", "cancelled")]
    if not phases or phases[-1]["event"] == "started":
        return JobState(job.id, "UNKNOWN" if job.executor == "slurm" else "FAILED")
    if phases[-1]["event"] == "cancelled" or phases[-1]["status"] == ExitStatus.TERMINATED:
        return JobState(job.id, "CANCELLED")
    return JobState(job.id, "FAILED" if phases[-1]["status"] else "COMPLETED")


def _is_running(process: str, submission: Path) -> bool:
    """Whether the process is still that of the submission: process ids are reused."""
    try:
        return str(submission.absolute()).encode() in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def queue_states(users: Iterable[int]) -> dict[str, JobState]:
    """Job id -> state of all jobs of these user ids in the queue."""
    # Queried by user: with -j, squeue fails for an id that is no longer in the queue.
    user_ids = ",".join(map(str, users))
    options = ("--states=all", "--array", "--noheader", "-o", _QUEUE)
    states = {}
    for line in check_output("squeue", f"--user={user_ids}", *options).splitlines():
        job, state, reason, nodes, start = line.split("|")
        states[job] = JobState(job, state, _or_empty(reason), nodes, _or_empty(start))
    return states


def accounting_states(source: list[str], jobs: list[str]) -> dict[str, JobState]:
    """Job id -> state of those `jobs` that sacct knows. source: sacct for the database or for completed jobs."""
    done = call([*source, "--noheader", "--parsable2", "-o", "JobID,State", "-j", ",".join(jobs)])
    states = {}
    # sacct fails on clusters without accounting.
    for line in done.stdout.splitlines() if not done.returncode else ():
        job, state = line.split("|")
        if "." not in job and state:
            states[job] = JobState(job, state.split()[0])  # `CANCELLED by 1000`
    return states


def _or_empty(text: str) -> str:
    return "" if text in ("None", "N/A", "(null)") else text


def resolve_dependency(dependency: str, root: Path) -> str:
    """A dependency with run names replaced by the ids of their last jobs: `afterok:pretrain` becomes `afterok:17`.

    Fulfilled conditions are dropped, as Slurm soon forgets ended jobs; of conditions separated by `?` one suffices, so
    it is empty if one is fulfilled. Raises NotFound for a name that is no run, UserError if the dependency can no
    longer be fulfilled.
    """
    separator = "?" if "?" in dependency else ","
    pending: list[str] = []
    failed: list[UserError] = []
    for condition in dependency.split(separator):
        kind, *jobs = condition.split(":")
        try:
            job_ids = [id for job in jobs for id in _unfinished_jobs(kind, job, root)]
        except _Unfulfillable as error:
            failed.append(error)
            continue
        if job_ids or not jobs:
            pending.append(":".join([kind, *job_ids]))
        elif separator == "?":
            return ""
    if failed and (separator == "," or not pending):
        raise failed[0]
    return separator.join(pending)


class _Unfulfillable(UserError):
    """A condition of a dependency that can no longer be fulfilled."""


_FULFILLED_BY = {
    "afterok": ("COMPLETED",),
    "aftercorr": ("COMPLETED",),
    "afternotok": ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"),
}
"""Dependency -> final states that fulfill it; any final state fulfills the others."""


def _unfinished_jobs(kind: str, job: str, root: Path) -> list[str]:
    if re.fullmatch(r"\d+(_\d+)?(\+\d+)?", job):
        return [job]
    job_ids = []
    runs = find_runs([job], root)
    by_slurm = query_slurm(runs)
    for run in runs:
        last = list(job_states(run, by_slurm).values())[-1]
        if last.is_live:
            job_ids.append(last.job)
        elif last.state not in _FULFILLED_BY.get(kind, (last.state,)):
            raise _Unfulfillable(
                f"--dependency {kind}:{job}: {run.path} has ended ({last.job} {last.state}); leave it out, or "
                f"megakernel resume {run.path}"
            )
    return job_ids

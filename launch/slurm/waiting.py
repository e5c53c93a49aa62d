"""Waiting for jobs, with or without their logs."""

import time
from collections.abc import Sequence

from launch.exit_status import ExitStatus

from .job_folder import Job, JobFolder
from .live import Watch, states_of
from .logs import Choice, LogReader
from .submission import Request

_POLL_SECONDS = 1.0


def wait(request: Request, jobs: Sequence[Job], follow: bool) -> int:
    """Wait until all have ended; 0 where all have done what they were to do, else 1."""
    runs = [JobFolder(member.run) for member in request.members]
    readers = [LogReader(run, Choice()) for run in runs] if follow else []
    ids = {job.id for job in jobs}
    watch = Watch({run: [job for job in run.jobs() if job.id in ids] for run in runs})
    while watch.any_live():
        show(readers)
        time.sleep(_POLL_SECONDS)
    show(readers)
    # Of a chain the last link tells.
    last = {job.id for job in (jobs if request.chain == 1 else jobs[-1:])}
    ends = [state for run in runs for job, state in states_of(run).items() if job in last]
    return ExitStatus.DONE if all(state.state == "COMPLETED" for state in ends) else ExitStatus.FAILED


def follow(run: JobFolder, reader: LogReader) -> None:
    """Show what is new until no job of the run is live."""
    watch = Watch({run: run.jobs()})
    while watch.any_live():
        show([reader])
        time.sleep(_POLL_SECONDS)
    show([reader])


def show(readers: Sequence[LogReader]) -> None:
    """Print what is new in every log."""
    for reader in readers:
        reader.show_new()

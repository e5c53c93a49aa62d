"""Waiting for jobs, with or without their logs."""

import time
from collections.abc import Sequence

from launch.exit_status import ExitStatus

from .job_folder import Job, JobFolder
from .live import states_of
from .logs import Choice, LogReader
from .submission import Request

_POLL_SECONDS = 1.0


def wait(request: Request, jobs: Sequence[Job], follow: bool) -> int:
    """Wait until all have ended; 0 where all have done what they were to do, else 1."""
    runs = [JobFolder(member.run) for member in request.members]
    readers = [LogReader(run, Choice()) for run in runs] if follow else []
    ids = {job.id for job in jobs}
    while True:
        states = {job: state for run in runs for job, state in states_of(run).items() if job in ids}
        for reader in readers:
            reader.show_new()
        if not any(state.is_live for state in states.values()):
            break
        time.sleep(_POLL_SECONDS)
    # Of a chain the last link tells.
    ends = [state for job, state in states.items() if request.chain == 1 or job == jobs[-1].id]
    return ExitStatus.DONE if all(state.state == "COMPLETED" for state in ends) else ExitStatus.FAILED

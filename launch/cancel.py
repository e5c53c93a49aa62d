"""`megakernel cancel`: cancel the jobs of runs."""

import argparse
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest

from launch.arguments import NotFound, add_job_run_arguments
from launch.slurm.job_folder import JobFolder, find_runs
from launch.slurm.states import JobState, job_states, query_slurm
from launch.slurm_programs import check_output
from megakernel.training import events

HELP = "cancel the jobs of submitted runs"
EXAMPLE = "megakernel cancel demo --save"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_job_run_arguments(parser)
    parser.add_argument(
        "--save", action="store_true", help="give the job time to save (else only Slurm's KillWait)"
    )
    parser.add_argument(
        "--chain", action="store_true", help="cancel the whole chain, not only its first live job"
    )


def run(args: argparse.Namespace) -> int:
    """Cancel the jobs."""
    runs = find_runs(args.runs, args.root)
    slurm_states = query_slurm(runs)
    jobs = {run: [job for job in job_states(run, slurm_states).values() if job.is_live] for run in runs}
    if not any(jobs.values()):
        named = " ".join(str(run.path) for run in runs[:3])
        raise NotFound(f"{named}: no live job; megakernel status {named} says how it ended")
    # The last job of a chain goes first: each would otherwise start when its predecessor ends.
    orders = [[(run, job) for job in (live[::-1] if args.chain else live[:1])] for run, live in jobs.items()]
    for batch in zip_longest(*orders):
        _cancel([pair for pair in batch if pair is not None], args.save)
    return 0


def _cancel(jobs: Sequence[tuple[JobFolder, JobState]], save: bool) -> None:
    """Cancel one job of each run: one scancel call for the Slurm jobs that save first, one for the others."""
    saving, ending = ["scancel", "--signal=TERM"], ["scancel"]
    for run, state in jobs:
        executors = {job.id: job.executor for job in run.jobs()}
        events.record(run.path, "cancelled", env={events.JOB_VARIABLE: state.job}, save=save)
        saves = save and not state.is_pending
        if executors[state.job] == "slurm":
            (saving if saves else ending).append(state.job)
        else:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(int(state.job), signal.SIGTERM)
        print(f"{state.job} {'saves and ends' if saves else 'ends'}: {run.path}")
    for command, options in ((saving, 2), (ending, 1)):
        if len(command) > options:
            check_output(*command)

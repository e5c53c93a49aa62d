"""`megakernel cancel`: end the jobs of runs."""

import argparse
import os
import signal
from collections.abc import Sequence
from itertools import zip_longest

from launch.arguments import NotFound, add_job_run_arguments
from launch.slurm.job_folder import JobFolder, find_runs
from launch.slurm.states import JobState, known_to_slurm, states_of
from launch.slurm_programs import ask
from megakernel.training import events

HELP = "end the jobs of submitted runs"
EXAMPLE = "megakernel cancel demo --save"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_job_run_arguments(parser)
    parser.add_argument(
        "--save", action="store_true", help="let it take the time to save (else what Slurm's KillWait leaves)"
    )
    parser.add_argument("--chain", action="store_true", help="all its jobs, not the first live one alone")


def run(args: argparse.Namespace) -> int:
    """Tell the jobs to end."""
    runs = find_runs(args.runs, args.root)
    known = known_to_slurm(runs)
    jobs = {run: [job for job in states_of(run, known).values() if job.is_live] for run in runs}
    if not any(jobs.values()):
        named = " ".join(str(run.path) for run in runs[:3])
        raise NotFound(f"{named}: no live job; megakernel status {named} says how it ended")
    # The last of a chain first, else the next one would start when its predecessor ends.
    orders = [
        [(run, job) for job in reversed(live if args.chain else live[:1])] for run, live in jobs.items()
    ]
    for together in zip_longest(*orders):
        _end([pair for pair in together if pair is not None], args.save)
    return 0


def _end(jobs: Sequence[tuple[JobFolder, JobState]], save: bool) -> None:
    """Tell one job of each of these runs to end, Slurm's in one call each for those that save and those that do not."""
    saving, ending = ["scancel", "--signal=TERM"], ["scancel"]
    for run, state in jobs:
        executors = {job.id: job.executor for job in run.jobs()}
        events.record(run.path, "cancelled", env={events.JOB_VARIABLE: state.job}, save=save)
        saves = save and not state.is_pending
        if executors[state.job] == "slurm":
            (saving if saves else ending).append(state.job)
        else:
            os.kill(int(state.job), signal.SIGTERM)
        print(f"{state.job} {'saves and ends' if saves else 'ends'}: {run.path}")
    for command, options in ((saving, 2), (ending, 1)):
        if len(command) > options:
            ask(*command)

"""`megakernel cancel`: end the job of a run."""

import argparse
import os
import signal

from launch.arguments import NotFound, add_job_run_arguments
from launch.slurm.job_folder import find_run
from launch.slurm.states import states_of
from launch.slurm_programs import ask
from megakernel.training import events

HELP = "end the job of a submitted run"
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
    folder = find_run(args.run, args.root)
    executors = {job.id: job.executor for job in folder.jobs()}
    live = [state for state in states_of(folder).values() if state.is_live]
    if not live:
        raise NotFound(f"{folder.path} has no live job; megakernel status {folder.path} says how it ended")
    # The last of a chain first, else the next one would start when its predecessor ends.
    for state in reversed(live if args.chain else live[:1]):
        events.record(folder.path, "cancelled", env={events.JOB_VARIABLE: state.job}, save=args.save)
        if executors[state.job] != "slurm":
            os.kill(int(state.job), signal.SIGTERM)
        elif args.save and not state.is_pending:
            ask("scancel", "--signal=TERM", state.job)
        else:
            ask("scancel", state.job)
        how = "saves and ends" if args.save and not state.is_pending else "ends"
        print(f"{state.job} {how}: {folder.path}")
    return 0

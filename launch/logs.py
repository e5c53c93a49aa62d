"""`megakernel logs`: what the processes of submitted runs wrote."""

import argparse
import re
from pathlib import Path

from launch.arguments import NotFound, Number, add_job_run_arguments
from launch.slurm.job_folder import find_runs
from launch.slurm.log_files import BATCH, Choice, LogReader, follow
from megakernel.config import UserError

HELP = "show what the processes of submitted runs wrote"
EXAMPLE = "megakernel logs demo -f --rank all --grep loss"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_job_run_arguments(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until no job of the run is live")
    parser.add_argument(
        "--rank",
        default="0",
        metavar="R",
        help=f"process, all of them (all), or the batch script ({BATCH}); default 0",
    )
    parser.add_argument(
        "--restart", type=Number(int, 0), metavar="K", help="start of the newest job (default: its last)"
    )
    parser.add_argument("--stderr", action="store_true", help="standard error in place of standard output")
    parser.add_argument("--grep", metavar="RE", help="only lines in which this regular expression is found")
    parser.add_argument(
        "-n", type=Number(int, 0), default=50, metavar="N", help="last lines to show (default %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the lines."""
    runs = find_runs(args.runs, args.root)
    if args.rank not in ("all", BATCH) and not args.rank.isdigit():
        raise UserError(f"--rank {args.rank} is no process; give a number, all or {BATCH}")
    try:
        pattern = re.compile(args.grep) if args.grep is not None else None
    except re.error as error:
        raise UserError(f"--grep {args.grep} is no regular expression ({error}); see Python's re") from None
    choice = Choice(args.rank, args.restart, args.stderr, pattern, is_named=len(runs) > 1)
    readers = [LogReader(run, choice) for run in runs]
    found = [reader.show_last(args.n) for reader in readers]
    if args.follow:
        follow(readers, {run: run.jobs() for run in runs})
    elif not any(found):
        raise NotFound(f"{runs[0].path} has no such log yet; {_what_there_is(runs[0].path)}")
    return 0


def _what_there_is(run: Path) -> str:
    names = sorted(str(path.relative_to(run)) for path in run.glob("logs/**/*.log"))
    return f"there are {', '.join(names[:8])}" if names else "its job has not started"

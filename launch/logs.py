"""`megakernel logs`: the output of the processes of submitted runs."""

import argparse
import re
from pathlib import Path

from launch.arguments import NotFound, Number, add_job_run_arguments
from launch.slurm.job_folder import find_runs
from launch.slurm.log_files import BATCH, LogReader, LogSelection, follow
from megakernel.config import UserError

HELP = "show the output of submitted runs"
EXAMPLE = "megakernel logs demo -f --rank all --grep loss"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add_job_run_arguments(parser)
    add("-f", "--follow", action="store_true", help="print new lines until no job of the run is live")
    add(
        "--rank",
        default="0",
        metavar="R",
        help=f"a rank, all ranks (all), or the batch script ({BATCH}); default 0",
    )
    add("--restart", type=Number(int, 0), metavar="K", help="start of the newest job (default: its last)")
    add("--stderr", action="store_true", help="standard error instead of standard output")
    add("--grep", metavar="RE", help="only lines that match this regular expression")
    add("-n", type=Number(int, 0), default=50, metavar="N", help="last lines to show (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the last lines of the logs and, with --follow, new ones."""
    runs = find_runs(args.runs, args.root)
    if args.rank not in ("all", BATCH) and not args.rank.isdigit():
        raise UserError(f"--rank {args.rank} is no rank; give a number, all or {BATCH}")
    if args.rank == BATCH and (args.restart is not None or args.stderr):
        option = "--stderr" if args.restart is None else f"--restart {args.restart}"
        raise UserError(f"{option} has no effect with --rank {BATCH}, whose log is one file; leave it out")
    try:
        pattern = re.compile(args.grep) if args.grep is not None else None
    except re.error as error:
        raise UserError(f"--grep {args.grep} is no regular expression ({error}); see Python's re") from None
    selection = LogSelection(args.rank, args.restart, args.stderr, pattern, shows_run_name=len(runs) > 1)
    readers = [LogReader(run, selection) for run in runs]
    has_logs = [reader.show_last(args.n, to_end=not args.follow) for reader in readers]
    if args.follow:
        follow(readers, {run: run.jobs() for run in runs})
    elif not any(has_logs):
        raise NotFound(f"{runs[0].path} has no such log yet; {_existing_logs(runs[0].path)}")
    return 0


def _existing_logs(run: Path) -> str:
    names = sorted(str(path.relative_to(run)) for path in run.glob("logs/**/*.log"))
    return f"there are {', '.join(names[:8])}" if names else "its job has not started"

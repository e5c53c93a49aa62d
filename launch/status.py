"""`megakernel status`: the state and progress of submitted runs."""

import argparse
import json
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from launch.arguments import RUNS, add_job_run_arguments
from launch.messages import console, printable
from launch.run_status import RunStatus, line_width, statuses, table
from launch.slurm.job_folder import all_runs, find_runs
from megakernel.config import UserError

HELP = "show the status of submitted runs: state, reason, step, loss, speed, nodes"
EXAMPLE = "megakernel status demo --watch"

_WATCH_SECONDS = 2.0
_COLUMNS = ("job", "state", "step", "loss", "tokens/s", "restarts", "why")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add_job_run_arguments(parser, optional=True)
    add("--all", action="store_true", help="every submitted run (the default without RUN)")
    add("--watch", action="store_true", help="update every two seconds until Ctrl-C")
    add("--json", action="store_true", help="print one JSON object for each run")


def run(args: argparse.Namespace) -> int:
    """Print the status of the named runs, or of all."""
    if args.all and args.runs:
        raise UserError(f"--all and {' '.join(args.runs)} exclude each other; leave one out")
    if args.watch and args.json:
        raise UserError("--watch is for people and --json for programs; leave one out")
    while True:
        runs = find_runs(args.runs, args.root) if args.runs else all_runs(args.root)
        current = statuses(runs)
        if args.watch:
            console().clear()
        _show(current, args)
        if not args.watch:
            return 0
        time.sleep(_WATCH_SECONDS)


def _show(current: Sequence[RunStatus], args: argparse.Namespace) -> None:
    if args.json:
        for status in current:
            print(json.dumps(status.as_dict()))
    elif args.runs and len(current) == 1:
        for name, value in current[0].rows():
            value = printable(value)
            indent = " " * 11
            width = line_width()
            lines = [value] if width is None else textwrap.wrap(value, max(24, width - len(indent)))
            print(f"{name:<10} " + f"\n{indent}".join(lines))
    elif current:
        print(table(current, args.root, _COLUMNS, line_width()))
    else:
        print(f"no run was submitted from {args.root}{_local_runs(args.root)}")


def _local_runs(root: Path) -> str:
    """What shows the runs under `root` that were started without a job; empty if there are none."""
    folders = [file.parent for file in root.glob("*/config.yaml")]
    if not folders:
        return ""
    where = "" if root == RUNS else f" --root {root}"
    return f"; megakernel monitor --once{where} shows the runs that were started there without a job"

"""`megakernel monitor`: TensorBoard, and a table of all runs."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launch.arguments import NotFound, Number, add_root_argument
from launch.found_runs import find, runs_in
from launch.messages import console
from launch.run_status import RunStatus, line_width, statuses, table
from launch.slurm.job_folder import JobFolder
from launch.terminal_curves import DEFAULT_WIDTH, check_curves, curves
from megakernel.config import UserError

HELP = "start TensorBoard and show the progress of runs"
EXAMPLE = "megakernel monitor first sharded --every 10"

_COLUMNS = ("state", "step", "loss", "eval", "tokens/s", "MFU", "ETA", "remarks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add(
        "runs",
        nargs="*",
        metavar="RUN",
        help="folders of runs, or names under --root (default: all runs there, including later ones)",
    )
    add_root_argument(parser)
    add("--once", action="store_true", help="print the table once, without TensorBoard")
    add("--no-tensorboard", action="store_true", help="show only the table")
    add(
        "--curve",
        action="store_true",
        help="draw each run's losses over its tokens below the table (plotext)",
    )
    add("--json", action="store_true", help="print one JSON object for each run once, without TensorBoard")
    add("--host", help="address to serve on (default localhost)")
    add("--port", type=int, metavar="P", help="port; 0: any (default: 6006 or the next free one)")
    add(
        "--every",
        type=Number(float, maximum=86_400),
        metavar="S",
        help="seconds between updates (default 5)",
    )


def run(args: argparse.Namespace) -> int:
    """Show the runs once, or until Ctrl-C."""
    alone = "--json" if args.json else "--once" if args.once else "--no-tensorboard"
    once = args.once or args.json
    for option in ("host", "port", *(["every"] if once else [])):
        if (once or args.no_tensorboard) and (value := getattr(args, option)) is not None:
            raise UserError(f"--{option} {value} has no effect with {alone}; leave one out")
    if args.curve and args.json:
        raise UserError("--curve has no effect with --json; leave one out")
    if args.curve:
        check_curves()
    every = 5.0 if args.every is None else args.every
    if every <= 0:
        raise UserError(f"--every {every} is not positive; give seconds, such as 5")
    if args.port is not None and not 0 <= args.port < 1 << 16:
        raise UserError(f"--port {args.port} is no port; give 0 to 65535, or leave it out")
    folders = [folder for text in args.runs for folder in find(text, args.root)]
    if not folders and not args.root.is_dir():
        raise NotFound(f"{args.root} does not exist; give --root, or train a run first")

    def current() -> list[RunStatus]:
        return statuses([JobFolder(folder) for folder in folders or sorted(runs_in(args.root))])

    def render() -> str:
        now = current()
        shown = [table(now, args.root, _COLUMNS, line_width())]
        if args.curve:
            shown += [_curves(status, args.root) for status in now]
        return "\n\n".join(shown)

    if args.json:
        for status in current():
            print(json.dumps(status.as_dict()))
        return 0
    if args.once:
        print(render())
        return 0
    if not args.no_tensorboard:
        print(
            f"TensorBoard: {start_tensorboard(args.root, folders, args.host or 'localhost', args.port)}",
            flush=True,
        )
    try:
        if not sys.stdout.isatty():
            print(render(), flush=True)
            while True:
                time.sleep(every)
        from rich.live import Live
        from rich.text import Text

        with Live(console=console(highlight=False), auto_refresh=False) as live:
            while True:
                live.update(Text(render()), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:
        return 0


def _curves(status: RunStatus, root: Path) -> str:
    """The curves of a run, which of an up-training are those of its current stage."""
    folder = status.run if status.stage is None else status.run / status.stage
    name = folder.relative_to(root) if folder.is_relative_to(root) else folder
    return curves(folder, str(name), line_width() or DEFAULT_WIDTH)


def start_tensorboard(root: Path, runs: Sequence[Path], host: str, port: int | None) -> str:
    """Serve TensorBoard in a thread until this process ends; returns the address.

    runs: the runs to show; if empty, all under `root`, including later ones. port: None takes 6006 or the next free
    one, 0 any free one. Raises UserError if the port is taken or invalid.
    """
    from tensorboard.program import TensorBoard, TensorBoardServerException

    logdir = ["--logdir", str(root)]
    if runs:
        # Named as in the table: TensorBoard shows only one of several runs with the same name.
        logdir = ["--logdir_spec", ",".join(f"{os.path.relpath(run, root)}:{run}" for run in runs)]
    address = ["--host", host, "--port", "default" if port is None else str(port)]
    server = TensorBoard()
    server.configure(argv=["", *logdir, *address])
    try:
        return server.launch()
    except TensorBoardServerException as error:
        raise UserError(f"--host {host} --port {port}: {error.msg}; leave --port out, or take 0") from None
    except SystemExit:  # werkzeug's answer to an address that is not this machine's
        raise UserError(f"--host {host} cannot be served from; give an address of this machine") from None

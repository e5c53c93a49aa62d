"""`megakernel monitor`: TensorBoard, and all runs in one table."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.arguments import NotFound, Number, add_root_argument, folders_of
from launch.messages import console
from launch.run_progress import saved_step
from launch.run_status import line_width, statuses, table
from launch.slurm.job_folder import JobFolder
from megakernel.checkpoint.trained_run import block_folders
from megakernel.config import UserError
from megakernel.config.errors import nearest_first

HELP = "start TensorBoard on runs, and show how far they are"
EXAMPLE = "megakernel monitor first sharded --every 10"

_COLUMNS = ("state", "step", "loss", "tokens/s", "MFU", "ETA", "remarks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="folders of runs, or names under --root (default: all runs there, also those to come)",
    )
    add_root_argument(parser)
    parser.add_argument("--once", action="store_true", help="print the table once, without TensorBoard")
    parser.add_argument("--no-tensorboard", action="store_true", help="show the table alone")
    parser.add_argument("--host", default="localhost", help="address to serve on (default %(default)s)")
    parser.add_argument(
        "--port", type=int, metavar="P", help="to serve on; 0: any (default: 6006 or the next)"
    )
    parser.add_argument(
        "--every",
        type=Number(float, most=86_400),
        default=5.0,
        metavar="S",
        help="seconds between two looks (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Show runs until Ctrl-C, or once."""
    if args.every <= 0:
        raise UserError(f"--every {args.every} is no time between two looks; give seconds, such as 5")
    if args.port is not None and not 0 <= args.port < 1 << 16:
        raise UserError(f"--port {args.port} is none; give 0 to 65535, or leave it out")
    named = [folder for text in args.runs for folder in _named(text, args.root)]
    if not named and not args.root.is_dir():
        raise NotFound(f"{args.root} does not exist; give --root, or train a run first")

    def look() -> str:
        runs = [JobFolder(folder) for folder in named or sorted(_runs_in(args.root))]
        return table(statuses(runs), args.root, _COLUMNS, line_width())

    if args.once:
        print(look())
        return 0
    if not args.no_tensorboard:
        print(f"TensorBoard: {start_tensorboard(args.root, named, args.host, args.port)}", flush=True)
    try:
        if not sys.stdout.isatty():
            print(look(), flush=True)
            while True:
                time.sleep(args.every)
        from rich.live import Live
        from rich.text import Text

        with Live(console=console(highlight=False), auto_refresh=False) as live:
            while True:
                live.update(Text(look()), refresh=True)
                time.sleep(args.every)
    except KeyboardInterrupt:
        return 0


def start_tensorboard(root: Path, runs: Sequence[Path], host: str, port: int | None) -> str:
    """Serve TensorBoard in a thread until this process ends; returns the address.

    runs: the runs to show, by name; none: all under `root`, those to come too. port: None takes 6006, or the next one
    that is free; 0 any free one. Raises UserError where the port is taken or is none.
    """
    from tensorboard.program import TensorBoard, TensorBoardServerException

    shown = ["--logdir", str(root)]
    if len(runs) == 1:
        shown = ["--logdir", str(runs[0])]
    elif runs:
        shown = ["--logdir_spec", ",".join(f"{run.name}:{run}" for run in runs)]
    where = ["--host", host, "--port", "default" if port is None else str(port)]
    server = TensorBoard()
    server.configure(argv=["", *shown, *where])
    try:
        return server.launch()
    except TensorBoardServerException as error:
        raise UserError(f"--host {host} --port {port}: {error.msg}; leave --port out, or take 0") from None


def _named(text: str, root: Path) -> list[Path]:
    """The run that a folder or a name means; of an up-training, its stages."""
    for folder in folders_of(text, root):
        if _is_run(folder):
            return [folder]
        if found := sorted(_stages(folder)):
            return found
    names = (str(run.relative_to(root)) for run in _runs_in(root))
    raise NotFound(f"{text} is no run; runs: {nearest_first(text, names, most=5) or f'none yet in {root}'}")


def _runs_in(root: Path) -> Iterator[Path]:
    for folder in root.glob("*"):
        if _is_run(folder):
            yield folder
        else:
            yield from _stages(folder)


def _stages(folder: Path) -> Iterator[Path]:
    """The stages of an up-training; of one that takes layers block by block the block that it is at."""
    for stage in folder.glob("*"):
        if _is_run(stage):
            blocks = [] if saved_step(stage) else block_folders(stage)
            yield [stage, *blocks][-1]


def _is_run(folder: Path) -> bool:
    """Whether something was trained there, or is to be; an up-training itself has no checkpoints, its stages have."""
    return JobFolder(folder).exists or (
        (folder / "config.yaml").exists() and (folder / "checkpoints").is_dir()
    )

"""The arguments of commands that read the folder of a run."""

import argparse
from pathlib import Path


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare RUN and which of its checkpoints."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run, such as runs/demo")
    parser.add_argument(
        "--step", type=int, metavar="S", help="checkpoint of this step (default: the newest good one)"
    )


def add_job_run_arguments(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """Declare RUN of commands that look after submitted runs, and where their folders are."""
    text = "a submitted run: its folder, its name under --root, or the id of one of its jobs"
    parser.add_argument("run", metavar="RUN", nargs="?" if optional else None, help=text)
    add_root_argument(parser)


def add_root_argument(parser: argparse.ArgumentParser) -> None:
    """Declare where the folders of runs are."""
    parser.add_argument(
        "--root",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="folder of all runs (default %(default)s)",
    )

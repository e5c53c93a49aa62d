"""The arguments of commands that read the folder of a run."""

import argparse
from pathlib import Path


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare RUN and which of its checkpoints."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run, such as runs/demo")
    parser.add_argument(
        "--step", type=int, metavar="S", help="checkpoint of this step (default: the newest good one)"
    )

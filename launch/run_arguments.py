"""The arguments of commands that read the folder of a run."""

import argparse
from pathlib import Path

from megakernel.config import UserError


class NotFound(UserError):
    """There is no such run, job or log."""


RUNS = Path("runs")
"""Where the folders of runs are unless a command is told."""


def folders_of(text: str, root: Path = RUNS) -> tuple[Path, Path]:
    """Where a run may lie that was named on a command line: that folder, or the one of that name under `root`."""
    return Path(text), root / text


def _trained_run(text: str) -> Path:
    plain, named = folders_of(text)
    if (plain / "config.yaml").is_file() or (plain.exists() and not (named / "config.yaml").is_file()):
        return plain
    return plain if len(plain.parts) > 1 and not named.exists() else named


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare RUN and which of its checkpoints."""
    parser.add_argument(
        "run_folder", type=_trained_run, metavar="RUN", help=f"a run: its folder, or its name in {RUNS}"
    )
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
        default=RUNS,
        metavar="DIR",
        help="folder of all runs (default %(default)s)",
    )

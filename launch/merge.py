"""`megakernel merge`: several prepared folders become one."""

import argparse
import signal
from glob import glob
from pathlib import Path

from launch.local import exit_with, handle_signals
from launch.messages import console
from megakernel.config.data import is_pattern
from megakernel.config.errors import UserError

HELP = "make one prepared folder of several, such as the shards of a job array"

EXAMPLE = "megakernel merge data/web-0 data/web-1 --out data/web"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="folder of `megakernel prepare`, or a quoted pattern such as 'data/web-*'",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a prepared folder with other content"
    )


def run(args: argparse.Namespace) -> int:
    """Merge the folders. Raises UserError for what the user can fix."""
    from data_pipeline.merge import merge

    folders: list[Path] = []
    for folder in args.folders:
        # A job's command is not expanded by a shell, and a shell expands no more than a few megabytes.
        matches = sorted(map(Path, glob(str(folder)))) if is_pattern(folder) else [folder]
        if not matches:
            raise UserError(f"{folder} matches no folder; name folders of `megakernel prepare`")
        folders += matches
    stderr = console(stderr=True)
    with handle_signals((signal.SIGTERM, signal.SIGHUP), exit_with):
        manifest = merge(folders, args.out, overwrite=args.overwrite, console=stderr)
    if manifest is None:
        stderr.print(f"{args.out} already holds these folders; nothing to do", soft_wrap=True)
    return 0

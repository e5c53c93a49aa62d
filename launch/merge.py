"""`megakernel merge`: several prepared folders become one."""

import argparse
import signal
from pathlib import Path

from launch.local import exit_with, handle_signals
from launch.messages import console

HELP = "make one prepared folder of several, such as the shards of a job array"

EXAMPLE = "megakernel merge data/web-0 data/web-1 --out data/web"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="folder of `megakernel prepare`"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a prepared folder with other content"
    )


def run(args: argparse.Namespace) -> int:
    """Merge the folders. Raises UserError for what the user can fix."""
    from data_pipeline.merge import merge

    stderr = console(stderr=True)
    with handle_signals((signal.SIGTERM, signal.SIGHUP), exit_with):
        manifest = merge(args.folders, args.out, overwrite=args.overwrite, console=stderr)
    if manifest is None:
        stderr.print(f"{args.out} already holds these folders; nothing to do", soft_wrap=True)
    return 0

"""`megakernel dev bench`: runs `python -m benchmarks.kernels.attention`, in a checkout, for `submit`."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from megakernel.config import UserError

HELP = "benchmark attention against other implementations: time, peak memory, share of the device's limits"
EXAMPLE = "megakernel dev bench attention --suite cpu --max-tokens 4096"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("what", choices=["attention"], help="what to measure")
    parser.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        help="of `python -m benchmarks.kernels.attention`: see its --help",
    )


def run(args: argparse.Namespace) -> int:
    """Run the module in a process of its own: an installed package has no `benchmarks`, and imports none."""
    checkout = Path(__file__).parents[1]
    if not (checkout / "benchmarks" / "kernels" / "attention").is_dir():
        raise UserError(f"bench: {checkout} has no benchmarks/; run bench from a checkout of the sources")
    path = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "benchmarks.kernels.attention", *args.options]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode

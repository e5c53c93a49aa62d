"""Files that come with the package and are not code: the folders `configs` and `slurm`."""

import sys
from pathlib import Path

from launch.messages import printable

_IN_WHEEL = Path(__file__).parent / "shipped"
"""Where setup.py puts these folders in a wheel."""

REPOSITORY = Path(__file__).resolve().parents[1]
"""The checkout that this code is in; for an installed wheel, site-packages."""


def folder(name: str) -> Path:
    """The folder `configs` or `slurm`: of the wheel that is installed, else of the checkout."""
    installed = _IN_WHEEL / name
    return installed if installed.is_dir() else REPOSITORY / name


def config_file(text: str) -> str:
    """The CONFIG of a command line: that path, or the shipped file of this name where the working folder has none.

    Prints a line if it is the shipped file, as another file may have been meant.
    """
    path = Path(text)
    if path.parts[:1] != ("configs",) or path.exists():
        return text
    shipped = folder("configs").joinpath(*path.parts[1:])
    if not shipped.is_file():
        return text
    print(f"{printable(text)} is not in this folder; reading {shipped}", file=sys.stderr, flush=True)
    return str(shipped)

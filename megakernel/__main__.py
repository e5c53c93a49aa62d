"""`python -m megakernel`, and in a checkout also `torchrun megakernel`: the command `megakernel`."""

import sys
from pathlib import Path

if __package__ == "":  # run as a folder: sys.path begins with it in place of the folder that has all packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.cli import main

if __name__ == "__main__":
    sys.exit(main())

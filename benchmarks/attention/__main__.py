"""`python -m benchmarks.attention --suite default`: `megakernel dev bench attention` where nothing is installed."""

import sys

from launch.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "attention", *sys.argv[1:]]))

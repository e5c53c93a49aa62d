"""`megakernel bench attention` for a checkout that is not installed.

python -m benchmarks.attention --suite default
"""

import sys

from launch.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "attention", *sys.argv[1:]]))

"""`megakernel dev reshape`: says that a checkpoint needs no conversion, which earlier versions made."""

import argparse

from launch.arguments import add_run_arguments

HELP = "check a checkpoint that a run can continue from on any parallel layout; nothing has to be converted"
EXAMPLE = "megakernel dev reshape runs/demo"

add_arguments = add_run_arguments


def run(args: argparse.Namespace) -> int:
    """Verify a checkpoint, and say how to continue from it."""
    from megakernel.checkpoint.trained_run import find_checkpoint

    folder = find_checkpoint(args.run_folder, step=args.step).folder
    print(
        f"{folder} needs no conversion: start the run with other keys of parallel, and it continues from there"
    )
    return 0

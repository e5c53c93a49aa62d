"""`megakernel dev reshape`: converts a checkpoint for another parallel layout."""

import argparse

from launch.arguments import add_run_arguments

HELP = "convert a checkpoint so that a run can continue with another parallel layout"
EXAMPLE = "megakernel dev reshape runs/demo"

add_arguments = add_run_arguments


def run(args: argparse.Namespace) -> int:
    """Write a checkpoint in DeepSpeed's universal format next to it."""
    from megakernel.checkpoint.reshape import reshape_run

    print(f"{reshape_run(args.run_folder, step=args.step)} can be continued on any layout")
    return 0

"""`megakernel config`: the resolved configuration, and help on every key."""

import argparse
import sys

from launch.config_arguments import add_config_arguments, load_config
from megakernel.config import to_yaml

HELP = "print the configuration of a run, every key with its value"
EXAMPLE = "megakernel config configs/demo.yaml model.attention=softmax"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Check the configuration and print it as YAML that loads to an equal one."""
    text = to_yaml(load_config(args))
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax

        Console().print(Syntax(text, "yaml", background_color="default"))
    else:
        print(text, end="")
    return 0

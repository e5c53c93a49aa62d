"""The arguments of commands that read a configuration."""

import argparse

from megakernel.config import Config, load


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare CONFIG and its overrides."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file, such as configs/demo.yaml")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # else argparse names it among what is required
        metavar="section.key=value",
        help="keys to change, values as YAML: training.steps=100 model.attention=softmax",
    )


def load_config(args: argparse.Namespace) -> Config:
    """The configuration these arguments name; ConfigError with every problem."""
    return load(args.config, args.overrides)

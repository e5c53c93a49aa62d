"""`megakernel pretrain`: train on this machine, or as one of the processes that torchrun or srun started."""

import argparse

from launch import training
from launch.arguments import add_allow_change
from megakernel.config import ConfigError, Problem, load

HELP = "train a model from scratch, or continue a stopped run"
EXAMPLE = "megakernel pretrain configs/demo.yaml training.steps=100 --nproc 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare CONFIG, its overrides, --nproc and --allow-change."""
    training.add_arguments(parser)
    add_allow_change(parser)


def run(args: argparse.Namespace) -> int:
    """Train as one process of a world, or start a world."""
    config = load(args.config, args.overrides)
    if config.uptrain is not None:
        remedy = "run `megakernel uptrain`, or remove the section"
        raise ConfigError([Problem("uptrain", "{...}", "has stages, and pretraining has none", remedy)])
    return training.run(args, config, args.allow_change)

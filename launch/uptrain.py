"""`megakernel uptrain`: turn a dense model into the configured one, stage by stage, in one resumable run."""

import argparse

from launch import training
from megakernel.config import ConfigError, Problem, load

HELP = "turn a dense model into a kernelized or FLuRKA model, stage by stage, or continue a stopped run"
EXAMPLE = "megakernel uptrain configs/uptrain/demo.yaml init.from=models/dense --nproc 2"

add_arguments = training.add_arguments


def run(args: argparse.Namespace) -> int:
    """Train all stages as one process of a world, or start a world."""
    config = load(args.config, args.overrides)
    if config.uptrain is None:
        remedy = "add one, such as uptrain: {transfer: {steps: 100}, alpha: 0.3}"
        raise ConfigError([Problem("uptrain", None, "is missing: it names the stages", remedy)])
    return training.run(args, config)

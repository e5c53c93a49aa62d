"""`megakernel pretrain`: train on this machine, or join the processes torchrun or srun started."""

import argparse
import os
import sys

from launch import local
from launch.config_arguments import add_config_arguments, load_config
from launch.environment import joined
from megakernel.config import Config, UserError, check_same_run, data_parallel_size
from megakernel.parallel.processes import ProcessEnvironment

HELP = "train a model from scratch, or go on with a run that was stopped"
EXAMPLE = "megakernel pretrain configs/demo.yaml training.steps=100 --nproc 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_config_arguments(parser)
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="processes to start on this machine, one per GPU (default 1); not under torchrun or srun",
    )


def run(args: argparse.Namespace) -> int:
    """Check the configuration against the world, then train as one process of it or start one."""
    config = load_config(args)
    process = joined()
    nproc = 1 if args.nproc is None else args.nproc
    world_size = nproc if process is None else process.world_size
    if world_size < 1 or args.nproc not in (None, world_size):
        raise UserError(
            f"--nproc {args.nproc} cannot be; leave it out under torchrun and srun, else give 1 or more"
        )
    data_parallel_size(config, world_size)
    return _train(config, process) if process is not None else _start(config, args, world_size)


def _train(config: Config, process: ProcessEnvironment) -> int:
    from megakernel.training.pretrain import pretrain
    from megakernel.training.stop_requests import hold_requests

    hold_requests()
    os.environ.update(process.variables())  # DeepSpeed and torch.distributed read them
    return pretrain(config, process)


def _start(config: Config, args: argparse.Namespace, world_size: int) -> int:
    recorded = config.run.folder / "config.yaml"
    if recorded.exists():  # an error now is one line; later it is one of every rank
        check_same_run(recorded.read_text(encoding="utf-8"), config, config.run.folder)
    command = [sys.executable, "-m", "launch.cli", "pretrain", args.config, *args.overrides]
    return local.run_ranks(command, world_size, config.run.folder / "logs")

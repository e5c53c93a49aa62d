"""`megakernel resume`: go on with a run whose jobs have ended."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.arguments import add_job_run_arguments
from launch.slurm.job_folder import JobFolder, find_run
from launch.slurm.options import add_cluster_options, cluster_of
from launch.slurm.states import live_jobs
from launch.submit import add_chain_option, add_job_options, carry_out, training_request
from megakernel.config import UserError, load

HELP = "submit a run again, from its newest checkpoint"
EXAMPLE = "megakernel resume demo training.steps=800 --nodes 4"

SET_ASIDE = ".set_aside"
"""Behind the name of a checkpoint that a run goes back behind."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_job_run_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys to change")
    parser.add_argument(
        "--from-step",
        type=int,
        metavar="S",
        help=f"checkpoint to go on from; later ones are renamed to {SET_ASIDE}",
    )
    add_cluster_options(parser)
    add_chain_option(parser)
    add_job_options(parser)


def run(args: argparse.Namespace) -> int:
    """Submit what was submitted last, with what is to be changed."""
    folder = find_run(args.run, args.root)
    last = folder.jobs()[-1]
    settings = folder.settings(last)
    if not settings.trains:
        raise UserError(
            f"{folder.path} ran `megakernel {settings.command[0]}`, which has nothing to go on with; submit it"
        )
    recorded = folder.path / "config.yaml"
    source = recorded if recorded.exists() else folder.submission(last.submission) / "config.yaml"
    config = load(source, args.overrides)
    if config.run.folder.absolute() != folder.path.absolute():
        raise UserError(
            f"run.root={config.run.root}, run.name={config.run.name} mean {config.run.folder.absolute()}, not "
            f"{folder.path.absolute()}; resume from the folder that it was submitted from"
        )
    request = training_request(
        {None: config}, cluster_of(args, settings.cluster), dependency=args.dependency, chain=args.chain
    )
    if args.from_step is None or args.dry_run or args.test_only:
        return carry_out(request, args)
    with _going_back(folder, args.from_step):
        return carry_out(request, args)


@contextmanager
def _going_back(run: JobFolder, step: int) -> Iterator[None]:
    """Set the checkpoints behind a step aside, and back again where the block fails."""
    root = run.path / "checkpoints"
    if run.stages():
        raise UserError(
            f"--from-step {step}: each stage of {run.path} has steps of its own; leave it out, or remove the folders "
            "of the stages to train again"
        )
    if live_jobs(run):
        raise UserError(f"{run.path} has a live job; --from-step {step} has to wait until it has ended")
    if not (root / f"step_{step}").is_dir():
        steps = ", ".join(str(number) for number in sorted(_steps(root))) or "none"
        raise UserError(f"--from-step {step}: {run.path} has no checkpoint of that step; there are {steps}")
    later = [path for number, path in _steps(root).items() if number > step]
    moved: list[tuple[Path, Path]] = []
    try:
        for path in later:
            moved.append((path, path.rename(_free(path))))
        yield
    except BaseException:
        for path, aside in moved:
            aside.rename(path)
        raise


def _steps(root: Path) -> dict[int, Path]:
    names = {path: path.name.removeprefix("step_") for path in root.glob("step_*")}
    return {int(name): path for path, name in names.items() if name.isdigit()}


def _free(path: Path) -> Path:
    """A name that no earlier return has taken."""
    number = sum(1 for _ in path.parent.glob(f"{path.name}{SET_ASIDE}*"))
    return path.with_name(f"{path.name}{SET_ASIDE}{number or ''}")

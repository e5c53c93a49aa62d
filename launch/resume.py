"""`megakernel resume`: continue runs whose jobs have ended."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launch.arguments import add_allow_change, add_job_run_arguments
from launch.slurm.job_folder import JobFolder, find_runs
from launch.slurm.options import add_cluster_options, cluster_of
from launch.slurm.states import refuse_live
from launch.submit import add_chain_option, add_job_options, carry_out, training_request
from megakernel.checkpoint.folder import LATEST, free_name
from megakernel.checkpoint.manifest import Damaged, SavedCheckpoint, step_of
from megakernel.config import UserError, load
from megakernel.training.run_folder import write_atomically

if TYPE_CHECKING:
    from launch.slurm.submission import Request

HELP = "continue submitted runs from their newest checkpoints"
EXAMPLE = "megakernel resume demo training.steps=800 --nodes 4"
NEEDS = ("submitit",)

SET_ASIDE = ".set_aside"
"""Suffix that --from-step appends to the names of later checkpoints."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_job_run_arguments(parser)
    parser.epilog = f"{parser.epilog}\n\nafter the runs: keys to change, as section.key=value"
    parser.add_argument(
        "--from-step",
        type=int,
        metavar="S",
        help=f"checkpoint to continue from; later ones are renamed to {SET_ASIDE}",
    )
    add_cluster_options(parser)
    add_chain_option(parser)
    add_allow_change(parser)
    add_job_options(parser)


def run(args: argparse.Namespace) -> int:
    """Submit each run's last submission again, with the changes."""
    overrides = [word for word in args.runs if "=" in word]
    names = [word for word in args.runs if word not in overrides]
    if not names:
        raise UserError(f"{' '.join(overrides)} changes no run; name the runs to continue before it")
    runs = find_runs(names, args.root)
    if len(runs) > 1 and (args.wait or args.follow):
        raise UserError(f"--wait and --follow are for one run, not for {len(runs)}; leave them out")
    # Check all before submitting the first.
    requests = [_request(folder, overrides, args) for folder in runs]
    # Submitting a run asks the same about it, but after the renaming of checkpoints, or the submission of others.
    if (len(runs) > 1 or args.from_step is not None) and not (args.dry_run or args.test_only):
        refuse_live(runs)
    return max(_submit(folder, request, args) for folder, request in zip(runs, requests))


def _request(folder: JobFolder, overrides: list[str], args: argparse.Namespace) -> "Request":
    last = folder.jobs()[-1]
    settings = folder.settings(last)
    if not settings.trains:
        raise UserError(
            f"{folder.path} ran `megakernel {settings.command[0]}`, which cannot continue; submit it"
        )
    if args.from_step is not None:
        _check_step(folder, args.from_step)
    recorded = folder.path / "config.yaml"
    source = recorded if recorded.exists() else folder.submission(last.submission) / "config.yaml"
    config = load(source, overrides)
    if config.run.folder.absolute() != folder.path.absolute():
        raise UserError(
            f"run.root={config.run.root}, run.name={config.run.name} mean {config.run.folder.absolute()}, not "
            f"{folder.path.absolute()}; resume from the folder that it was submitted from"
        )
    return training_request(
        {None: config},
        cluster_of(args, settings.cluster),
        dependency=args.dependency,
        root=args.root,
        chain=args.chain,
        allowed=args.allow_change,
        done=args.from_step,
    )


def _submit(folder: JobFolder, request: "Request", args: argparse.Namespace) -> int:
    if args.from_step is None or args.dry_run or args.test_only:
        return carry_out(request, args)
    with _later_checkpoints_renamed(folder, args.from_step):
        return carry_out(request, args)


def _check_step(run: JobFolder, step: int) -> None:
    """Raise UserError without an undamaged checkpoint of that step, or for stages, each with steps of its own."""
    root = run.path / "checkpoints"
    if run.stages():
        raise UserError(
            f"--from-step {step}: each stage of {run.path} has steps of its own; leave it out, or remove the folders "
            "of the stages to train again"
        )
    steps = ", ".join(str(number) for number in sorted(_steps(root))) or "none"
    if not (root / f"step_{step}").is_dir():
        raise UserError(f"--from-step {step}: {run.path} has no checkpoint of that step; there are {steps}")
    try:
        SavedCheckpoint.read(root / f"step_{step}")
    except Damaged as error:
        raise UserError(
            f"--from-step {step} cannot be used ({error}); choose another step of {steps}"
        ) from None


@contextmanager
def _later_checkpoints_renamed(run: JobFolder, step: int) -> Iterator[None]:
    """Rename the checkpoints after a step, and let `latest` name that step; undo it if the block fails."""
    root = run.path / "checkpoints"
    later = [path for number, path in _steps(root).items() if number > step]
    moved: list[tuple[Path, Path]] = []
    latest = root / LATEST
    newest = latest.read_text(encoding="utf-8") if latest.is_file() else None
    try:
        for path in later:
            moved.append((path, path.rename(free_name(path, SET_ASIDE))))
        write_atomically(latest, f"step_{step}")  # which steps are saved, for status and restarts
        yield
    except BaseException:
        for path, renamed in moved:
            renamed.rename(path)
        if newest is None:
            latest.unlink(missing_ok=True)
        else:
            write_atomically(latest, newest)
        raise


def _steps(root: Path) -> dict[int, Path]:
    return {step: path for path in root.glob("step_*") if (step := step_of(path)) is not None}

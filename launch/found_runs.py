"""The runs that names on a command line mean, and those in a folder of runs, the stages of up-trainings included."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from launch.arguments import NotFound, candidate_folders
from launch.run_progress import saved_step
from launch.slurm.job_folder import JobFolder
from megakernel.checkpoint.trained_run import block_folders
from megakernel.config.errors import nearest_first


def find(text: str, root: Path) -> list[Path]:
    """The run that a folder or a name means, or the stages of an up-training."""
    for folder in candidate_folders(text, root):
        if _is_run(folder):
            return [folder]
        if stages := sorted(_stages(folder)):
            return stages
    names = (str(run.relative_to(root)) for run in runs_in(root))
    raise NotFound(f"{text} is no run; runs: {nearest_first(text, names, most=5) or f'none yet in {root}'}")


def runs_in(root: Path) -> Iterator[Path]:
    """Yield the runs in a folder of runs, in no order."""
    for folder in root.glob("*"):
        with suppress(PermissionError):  # a private run of another user
            if _is_run(folder):
                yield folder
            else:
                yield from _stages(folder)


def _stages(folder: Path) -> Iterator[Path]:
    """Yield the stages of an up-training; instead of a stage that trains block by block, its current block."""
    for stage in folder.glob("*"):
        if _is_run(stage):
            blocks = [] if saved_step(stage) else block_folders(stage)
            yield [stage, *blocks][-1]


def _is_run(folder: Path) -> bool:
    """Whether the folder is that of a run, submitted or trained; of a local up-training only the stages are runs."""
    return JobFolder(folder).exists or (
        (folder / "config.yaml").exists() and (folder / "checkpoints").is_dir()
    )

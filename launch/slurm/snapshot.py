"""The code that a job was submitted with: enough to have it again after the checkout has moved on."""

import tarfile
from pathlib import Path

from megakernel.training.environment import git, revision

from .script import REPOSITORY

_CODE = ("megakernel/*.py", "launch/*.py", "data_pipeline/*.py", "slurm/*.sbatch")
"""What is taken along; anything else of a checkout may be data, or somebody's secrets."""


def write_snapshot(folder: Path, repository: Path = REPOSITORY) -> Path:
    """Write revision.txt, and where the code differs from it changes.diff and untracked.tar.gz.

    Gives the folder. To have them again: `git checkout REVISION`, `git apply changes.diff`, `tar xf untracked.tar.gz`.
    """
    folder.mkdir()
    (folder / "revision.txt").write_text(revision(repository / "launch" / "cli.py") + "\n")
    changes = git(repository, "diff", "--binary", "HEAD", "--", *_CODE)
    if changes:
        (folder / "changes.diff").write_text(changes + "\n")
    listed = git(repository, "ls-files", "--others", "--exclude-standard", "-z", "--", *_CODE) or ""
    sources = [repository / name for name in listed.split("\0") if name]
    if sources:
        with tarfile.open(folder / "untracked.tar.gz", "w:gz") as archive:
            for path in sources:
                archive.add(path, path.relative_to(repository))
    return folder

"""The code that a job was submitted with: enough to have it again after the checkout has moved on."""

import tarfile
from pathlib import Path

from megakernel.training.environment import git, revision

from .script import REPOSITORY

_LARGEST = 1 << 20
"""Bytes of an untracked file that is taken along: sources are smaller, data are larger."""


def write_snapshot(folder: Path, repository: Path = REPOSITORY) -> Path:
    """Write revision.txt, and where sources differ from it changes.diff and untracked.tar.gz.

    Gives the folder. To have them again: `git checkout REVISION`, `git apply changes.diff`, `tar xf untracked.tar.gz`.
    """
    folder.mkdir()
    (folder / "revision.txt").write_text(revision(repository / "launch" / "cli.py") + "\n")
    changes = git(repository, "diff", "--binary", "HEAD")
    if changes:
        (folder / "changes.diff").write_text(changes + "\n")
    listed = git(repository, "ls-files", "--others", "--exclude-standard", "-z") or ""
    untracked = [repository / name for name in listed.split("\0") if name]
    sources = [path for path in untracked if path.is_file() and path.stat().st_size <= _LARGEST]
    if sources:
        with tarfile.open(folder / "untracked.tar.gz", "w:gz") as archive:
            for path in sources:
                archive.add(path, path.relative_to(repository))
    return folder

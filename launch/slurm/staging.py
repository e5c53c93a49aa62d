"""The Python environment and the code of a job on each node's own disk: `python -m launch.slurm.staging ACTION ...`.

A training process opens thousands of files of Python and its packages, and looks for ten times as many. Read from a
shared file system by all processes of a job at once, this takes minutes. With the cluster's `stage: FOLDER` the batch
script packs the environment into archives beside it (`pack`; once, until a file of it changes), one process of each
node unpacks them below FOLDER (`unpack`), and the processes start from there. A node on which that fails says so, and
its processes read what they would read without. The script deletes the folder at the end of the job; what it
leaves after a minute, or a killed job leaves, the next one on that node deletes.
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from megakernel.config.errors import UserError, first_line

_STAGED = "stage.json"
"""File of a submission: the archives by the name of the folder that each becomes."""

COMPLETE = "complete"
"""File of a node's folder that is written last, with the archives that were unpacked."""

_LOCAL = ("/usr", "/bin", "/lib", "/lib64")
"""Folders that each node has on its own disk."""

_ARCHIVES = ".stage"
"""Folder of the archives in the environment."""


def is_local(prefix: str) -> bool:
    """Whether Python is installed in the system, which every node has on its own disk."""
    return any(Path(prefix).is_relative_to(folder) for folder in _LOCAL)


def job_folder(folder: str, job: str) -> Path:
    """The folder of a job on this node. Raises UserError if a variable in `folder` is not set here."""
    expanded = os.path.expandvars(folder)
    if "$" in expanded:
        raise UserError(f"stage={folder} has a variable that this node does not set")
    return Path(expanded) / f"megakernel-{job}"


def pack(submission: Path) -> str:
    """Make the archives that are missing or out of date; returns what was done.

    Raises OSError and subprocess.CalledProcessError if they cannot be written.
    """
    (submission / _STAGED).unlink(missing_ok=True)
    home = _archive_folder()
    home.mkdir(parents=True, exist_ok=True)
    roots = {"environment": (Path(sys.prefix), [f"./{_ARCHIVES}"])}
    if sys.base_prefix != sys.prefix and not is_local(sys.base_prefix):
        # Packages of the base are not the environment's.
        library = f"./lib/python{sys.version_info[0]}.{sys.version_info[1]}"
        roots["base"] = Path(sys.base_prefix), [f"{library}/site-packages", f"{library}/test"]
    packed, archives = [], {}
    with _locked(home / "lock"):
        for name, (root, left_out) in roots.items():
            archive = home / f"{name}-{_fingerprint(root, left_out)}.tar"
            if not archive.exists():
                packed.append(f"{root} to {archive}")
                _write_archive(archive, root, left_out)
                for other in home.glob(f"{name}-*"):
                    if other != archive:
                        other.unlink(missing_ok=True)
            archives[name] = archive
    archives["code"] = submission / "code.tar"
    _write_archive(archives["code"], submission / "code", [])
    text = json.dumps({name: str(archive) for name, archive in archives.items()})
    (submission / _STAGED).write_text(text, encoding="utf-8")
    size = sum(archive.stat().st_size for archive in archives.values())
    return f"{size / 1e9:.2f} GB to stage" + (f", packed {', '.join(packed)}" if packed else "")


def unpack(submission: Path, root: Path) -> str:
    """Unpack the archives into `root`, unless they are there; returns what was done.

    Raises UserError, OSError and subprocess.CalledProcessError if that is not possible.
    """
    started = time.monotonic()
    try:
        text = (submission / _STAGED).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("there are no archives") from None
    archives, complete = json.loads(text), root / COMPLETE
    _remove_ended(root)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(root / "lock"):  # of several nodes on one machine, one unpacks
        if complete.exists() and complete.read_text(encoding="utf-8") == text:
            return f"staged before, in {root}"
        complete.unlink(missing_ok=True)
        size = sum(os.path.getsize(archive) for archive in archives.values())
        if (free := shutil.disk_usage(root).free) < size:
            raise UserError(f"{root.parent} has {free / 1e9:.2f} GB free of {size / 1e9:.2f} GB")
        for name, archive in archives.items():
            shutil.rmtree(root / name, ignore_errors=True)
            (root / name).mkdir()
            subprocess.run(["tar", "-xf", archive, "-C", root / name], check=True, capture_output=True)
        if "base" in archives:
            _point_to(root / "environment", root / "base")
        complete.write_text(text, encoding="utf-8")
    return f"staged {size / 1e9:.2f} GB in {root} in {time.monotonic() - started:.0f} s"


def _point_to(environment: Path, base: Path) -> None:
    """Let a virtual environment start from a copy of its base installation."""
    file = environment / "pyvenv.cfg"
    home = re.sub(r"(?m)^home\s*=.*$", lambda _: f"home = {base / 'bin'}", file.read_text(encoding="utf-8"))
    file.write_text(home, encoding="utf-8")
    for link in (environment / "bin").iterdir():
        target = Path(os.readlink(link)) if link.is_symlink() else Path()
        if target.is_relative_to(sys.base_prefix):
            link.unlink()
            link.symlink_to(base / target.relative_to(sys.base_prefix))


def _archive_folder() -> Path:
    """Beside what is packed, so that it is deleted with that; for another's environment, in the user's cache."""
    # Here, as `unpack` does without the hundreds of files that it imports.
    from data_pipeline.verification import is_writable, user_cache

    prefix = Path(sys.prefix)
    if is_writable(prefix):
        return prefix / _ARCHIVES
    return user_cache() / "environments" / hashlib.sha256(str(prefix).encode()).hexdigest()[:16]


def _fingerprint(root: Path, left_out: Sequence[str]) -> str:
    """Changes with the name, size or time of any file."""
    digest = hashlib.sha256(json.dumps(left_out).encode())
    skipped = {os.path.join(root, pattern.removeprefix("./")) for pattern in left_out}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if os.path.join(folder, name) not in skipped)
        for name in sorted(names):
            path = os.path.join(folder, name)
            stat = os.lstat(path)
            digest.update(os.fsencode(f"{path} {stat.st_size} {stat.st_mtime_ns}\n"))
    return digest.hexdigest()[:16]


def _write_archive(archive: Path, root: Path, left_out: Sequence[str]) -> None:
    partial = archive.with_name(f"{archive.name}.partial-{uuid4().hex[:8]}")
    try:
        exclude = [f"--exclude={pattern}" for pattern in left_out]
        command = ["tar", "-cf", str(partial), *exclude, "-C", str(root), "."]
        subprocess.run(command, check=True, capture_output=True)
        partial.replace(archive)
    finally:
        partial.unlink(missing_ok=True)


def _remove_ended(root: Path) -> None:
    """Delete the folders of this user's jobs that have ended, which their scripts could not."""
    for other in root.parent.glob("megakernel-*"):
        job = other.name.removeprefix("megakernel-")
        with suppress(OSError):
            if other != root and job.isdecimal() and other.stat().st_uid == os.getuid() and _has_ended(job):
                shutil.rmtree(other, ignore_errors=True)


def _has_ended(job: str) -> bool:
    asked = subprocess.run(["squeue", "--noheader", "--jobs", job], capture_output=True, text=True)
    return not asked.stdout.strip() if asked.returncode == 0 else "Invalid job id" in asked.stderr


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("a") as stream:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Do the action and print one line about it; 1 if it fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("pack", "unpack"))
    parser.add_argument("submission", type=Path)
    parser.add_argument("--folder", default="", help="the cluster's `stage`")
    args = parser.parse_args()
    node = os.environ.get("SLURMD_NODENAME", "this machine")
    try:
        if args.action == "pack":
            print(f"== {pack(args.submission)}", flush=True)
            return 0
        root = job_folder(args.folder, os.environ["SLURM_JOB_ID"])
        print(f"== {node}: {unpack(args.submission, root)}", flush=True)
    except (UserError, OSError, subprocess.CalledProcessError) as error:
        reason = first_line(error)
        if isinstance(error, subprocess.CalledProcessError) and error.stderr:
            reason = error.stderr.decode(errors="replace").splitlines()[0]
        print(f"== {node}: not staged ({reason}); processes read {sys.prefix}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

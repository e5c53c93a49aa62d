"""What a start of a run ran on: enough to repeat it elsewhere, and to explain a difference."""

import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "megakernel",
    "torch",
    "triton",
    "megatron-core",
    "deepspeed",
    "liger-kernel",
    "datasets",
    "transformers",
    "tokenizers",
    "tensorboard",
    "numpy",
)
RECORDED_VARIABLES = ("NCCL_", "MEGAKERNEL_")


def environment_text(devices: Sequence[str], world_size: int) -> str:
    """One entry of environment.txt: time, command, host, devices, code, versions and variables.

    devices: names of the devices of this host, for example from torch.cuda.get_device_name.
    """
    entry = {
        "command": shlex.join([sys.executable, *sys.argv]),
        "folder": os.getcwd(),
        "host": f"{socket.gethostname()} ({platform.platform()})",
        "processes": str(world_size),
        "devices": ", ".join(devices),
        "code": revision(Path(__file__)),
        "python": platform.python_version(),
        **package_versions(),
        **_variables(os.environ),
    }
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return f"== started {started}\n" + "".join(f"{key}: {value}\n" for key, value in entry.items())


def package_versions() -> dict[str, str]:
    """Package -> installed version, of those that decide the numbers."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in sorted(environment) if name.startswith(RECORDED_VARIABLES)}


def revision(source: Path) -> str:
    """The git revision that `source` belongs to, marked dirty where tracked files differ from it."""
    # An installed package may lie inside a foreign repository: only a tracked file speaks for its revision.
    if git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return "not a git checkout"
    revision = git(source.parent, "rev-parse", "HEAD")
    changes = git(source.parent, "status", "--porcelain", "--untracked-files=no")
    return f"git {revision}{' (dirty)' if changes else ''}"


def git(folder: Path, *arguments: str) -> str | None:
    """What git prints, None where it fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None

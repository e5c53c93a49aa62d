"""The software and hardware environment of a start, recorded to reproduce a run and explain differences."""

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
_NAMES = """
MEGAKERNEL_BACKEND MEGAKERNEL_CLUSTER MEGAKERNEL_JOB MEGAKERNEL_RESTART MASTER_ADDR MASTER_PORT
OMP_NUM_THREADS CUDA_VISIBLE_DEVICES CUDA_DEVICE_MAX_CONNECTIONS PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF
TRITON_INTERPRET TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT GLOO_SOCKET_IFNAME
NCCL_ALGO NCCL_BUFFSIZE NCCL_COLLNET_ENABLE NCCL_CROSS_NIC NCCL_CUMEM_ENABLE NCCL_DEBUG NCCL_DEBUG_SUBSYS
NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_PCI_RELAXED_ORDERING
NCCL_IB_QPS_PER_CONNECTION NCCL_IB_RETRY_CNT NCCL_IB_SL NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_TC NCCL_IB_TIMEOUT
NCCL_MAX_CTAS NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS NCCL_NET NCCL_NET_GDR_LEVEL NCCL_NET_PLUGIN
NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROTO NCCL_SHM_DISABLE
NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS NCCL_TOPO_FILE NCCL_TUNER_PLUGIN
"""
RECORDED_VARIABLES = frozenset(_NAMES.split())
"""Variables that influence a run and contain no secrets; only these are written to files and logs."""


def environment_text(devices: Sequence[str], world_size: int) -> str:
    """One entry of environment.txt: time, command, host, devices, code, versions and RECORDED_VARIABLES.

    devices: names of this host's devices, such as from torch.cuda.get_device_name.
    """
    others, steering = os.environ.keys() - RECORDED_VARIABLES, ("NCCL_", "MEGAKERNEL_")
    entry = {
        "command": shlex.join([sys.executable, *sys.argv]),
        "folder": os.getcwd(),
        "host": f"{socket.gethostname()} ({platform.platform()})",
        "processes": str(world_size),
        "devices": ", ".join(devices),
        "code": revision(Path(__file__)),
        "python": platform.python_version(),
        **package_versions(),
        **recorded_variables(os.environ),
        "also set": ", ".join(sorted(other for other in others if other.startswith(steering))),
    }
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return f"== started {started}\n" + "".join(f"{key}: {value}\n" for key, value in entry.items())


def package_versions() -> dict[str, str]:
    """Installed version of each of PACKAGES, which affect the numbers."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The RECORDED_VARIABLES that are set; other values may be secrets and go into no file of a run."""
    return {name: environment[name] for name in sorted(RECORDED_VARIABLES & environment.keys())}


REVISION_FILE = "revision.txt"
"""File in a copy of the code with the revision that was copied."""


def revision(source: Path) -> str:
    """The git revision of `source`, marked dirty if tracked files have changed."""
    for folder in source.parents[:3]:
        if (folder / REVISION_FILE).is_file():
            return (folder / REVISION_FILE).read_text(encoding="utf-8").strip()
    # An installed package may lie inside another repository, which does not track it.
    if git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return "not a git checkout"
    revision = git(source.parent, "rev-parse", "HEAD")
    changes = git(source.parent, "status", "--porcelain", "--untracked-files=no")
    return f"git {revision}{' (dirty)' if changes else ''}"


def git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None if it fails or git is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None

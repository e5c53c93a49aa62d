"""`megakernel doctor`: what this machine has, what is missing, and what to do about it."""

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from rich.table import Table
from rich.text import Text

import megakernel
from launch.messages import console
from launch.slurm.errors import SlurmRefused
from launch.slurm.programs import ask

HELP = "show versions and devices, and what is missing on this machine"
EXAMPLE = "megakernel doctor"

State = Literal["good", "optional", "missing"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    what: str
    found: str
    state: State = "good"
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(args: argparse.Namespace) -> int:
    """Print every finding; 1 where something that is needed is missing."""
    findings = [
        finding for look in (_python, _packages, _devices, _collectives, _system) for finding in look()
    ]
    table = Table(box=None, pad_edge=False, show_header=False)
    marks = {"good": ("ok", "green"), "optional": ("-", "yellow"), "missing": ("missing", "bold red")}
    for finding in findings:
        mark, style = marks[finding.state]
        table.add_row(Text(mark, style), finding.what, finding.found, Text(finding.remedy, style))
    console().print(table)
    return 1 if any(finding.state == "missing" for finding in findings) else 0


def _python() -> Iterator[Finding]:
    is_new_enough = sys.version_info >= (3, 10)
    yield Finding("megakernel", megakernel.__version__)
    yield Finding(
        "python",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "good" if is_new_enough else "missing",
        "" if is_new_enough else "install Python 3.10 or newer",
    )


_NEEDED = {
    "torch": (2, 11),
    "megatron-core": (0, 16, 1),
    "deepspeed": (0, 19, 8),
    "datasets": (5, 2),
    "transformers": (5, 17),
    "tokenizers": (0, 22),
    "tensorboard": (2, 20),
    "submitit": (1, 5, 4),
    "pydantic": (2, 10),
    "numpy": (2,),
}


def _packages() -> Iterator[Finding]:
    needed = dict(_NEEDED, triton=(3, 6)) if platform.system() == "Linux" else _NEEDED
    for name, oldest in needed.items():
        wanted = ".".join(map(str, oldest))
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(name, "", "missing", f"pip install '{name}>={wanted}' -c constraints.txt")
            continue
        is_new_enough = _numbers(version) >= oldest
        remedy = "" if is_new_enough else f"pip install '{name}>={wanted}' -c constraints.txt"
        yield Finding(name, version, "good" if is_new_enough else "missing", remedy)
    yield _liger_kernel()


def _liger_kernel() -> Finding:
    try:
        return Finding("liger-kernel", metadata.version("liger-kernel"))
    except metadata.PackageNotFoundError:
        remedy = "fuses norms, SwiGLU, RoPE and the loss on GPUs: pip install -e '.[gpu]' -c constraints.txt"
        return Finding("liger-kernel", "none", "optional", remedy)


def _numbers(version: str) -> tuple[int, ...]:
    release = version.split("+")[0].split("rc")[0].split(".dev")[0]
    return tuple(int(part) for part in release.split(".") if part.isdigit())


def _devices() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError):
        return  # reported among the packages, or broken in a way that only reinstalling mends
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        yield Finding(
            f"cuda:{index}", f"{properties.name}, {memory}, sm_{properties.major}{properties.minor}"
        )
        if properties.major == 9 and _numbers(metadata.version("triton")) < (3, 7, 1):
            remedy = "pip install 'triton>=3.7.1': older ones gave wrong gradients on Hopper elsewhere"
            yield Finding("triton on Hopper", metadata.version("triton"), "optional", remedy)
    if not torch.cuda.is_available():
        built = f"torch built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch built for CPU"
        has_gpu = shutil.which("nvidia-smi") is not None
        remedy = "reinstall torch with CUDA to use the GPU" if has_gpu else "training runs on the CPU"
        yield Finding("cuda", f"no device ({built})", "optional", remedy)
    yield Finding("cpu", f"{len(os.sched_getaffinity(0))} cores")


def _collectives() -> Iterator[Finding]:
    try:
        from torch import distributed
    except (ImportError, OSError):
        return
    has_gloo = distributed.is_available() and distributed.is_gloo_available()
    yield Finding(
        "gloo",
        "yes" if has_gloo else "no",
        "good" if has_gloo else "missing",
        "" if has_gloo else "reinstall torch",
    )
    has_nccl = distributed.is_available() and distributed.is_nccl_available()
    yield Finding(
        "nccl",
        "yes" if has_nccl else "no",
        "good" if has_nccl else "optional",
        "" if has_nccl else "GPUs only",
    )


def _system() -> Iterator[Finding]:
    compiler = shutil.which("c++") or shutil.which("g++")
    remedy = "Triton kernels need one on a GPU machine: apt-get install g++"
    yield Finding(
        "C++ compiler", compiler or "none", "good" if compiler else "optional", "" if compiler else remedy
    )
    free = shutil.disk_usage(".").free / 2**30
    remedy = "a checkpoint needs about 14 bytes per parameter; set run.root to a larger disk"
    yield Finding(
        "disk here", f"{free:.0f} GiB free", "good" if free >= 5 else "optional", "" if free >= 5 else remedy
    )
    yield _slurm()


def _slurm() -> Finding:
    try:
        return Finding("Slurm", ask("sbatch", "--version").strip())
    except SlurmRefused as error:
        is_there = shutil.which("sbatch") is not None
        return Finding("Slurm", str(error) if is_there else "none", "optional", "only for clusters")

"""`megakernel doctor`: what is installed on this machine, what is missing, and how to fix it."""

import argparse
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

import megakernel
from launch.messages import console
from launch.slurm_programs import SlurmRefused, check_output
from megakernel.config.extras import EXTRAS, install

HELP = "show versions and devices, and what is missing on this machine"
EXAMPLE = "megakernel doctor"

State = Literal["good", "optional", "missing"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    value: str
    state: State = "good"
    remedy: str = ""
    """Shown unless the state is good."""

    command: str = ""
    """The command of the remedy, shown on a line of its own, to be copied."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(args: argparse.Namespace) -> int:
    """Print every finding, the machine first, then the remedies; return 1 if something required is missing."""
    findings = [finding for check in (_devices, _system, _python, _packages) for finding in check()]
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        mark, style = _MARKS[finding.state]
        table.add_row(Text(mark, style), finding.name, finding.value)
    out = console(highlight=False)
    out.print(table)
    remedies: dict[tuple[State, str, str], list[str]] = {}
    for finding in findings:
        if finding.state != "good":
            remedies.setdefault((finding.state, finding.remedy, finding.command), []).append(finding.name)
    if remedies:
        out.print()
    for (state, remedy, command), names in remedies.items():
        mark, style = _MARKS[state]
        out.print(Text(f"{mark} {', '.join(names)}{': ' * bool(remedy)}{remedy}", style))
        if command:  # a wrapped line could not be copied
            out.print(Text(f"  {command}"), soft_wrap=True)
    return 1 if any(finding.state == "missing" for finding in findings) else 0


_MARKS = {"good": ("ok", "green"), "optional": ("-", "yellow"), "missing": ("missing", "bold red")}
"""State -> its mark and style."""


def _python() -> Iterator[Finding]:
    yield Finding("megakernel", megakernel.__version__)
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("python", version)  # pip refuses unsupported versions


def _packages() -> Iterator[Finding]:
    """Findings about the required packages and those of extras."""
    try:
        requirements = [Requirement(line) for line in metadata.requires("megakernel") or ()]
    except metadata.PackageNotFoundError:
        yield Finding("packages", "unknown", "missing", command="pip install -e . -c constraints.txt")
        return
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            command = f"pip install '{_plain(requirement)}' -c constraints.txt"
            yield _package(requirement, "missing", "", command)
    for name, extra in EXTRAS.items():
        for requirement in requirements:
            marker = requirement.marker
            if marker and marker.evaluate({"extra": name}) and not marker.evaluate({"extra": ""}):
                yield _package(requirement, "optional", f"for {extra.use}", install(name))


def _plain(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _package(requirement: Requirement, state_if_missing: State, remedy: str, command: str) -> Finding:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Finding(requirement.name, "none", state_if_missing, remedy, command)
    fits = requirement.specifier.contains(version, prereleases=True)
    return Finding(requirement.name, version, "good" if fits else state_if_missing, remedy, command)


def _devices() -> Iterator[Finding]:
    try:
        import torch
        from torch import distributed
    except (ImportError, OSError):
        return  # either missing, which `_packages` reports, or broken
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    for index, properties in enumerate(devices):
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        yield Finding(
            f"cuda:{index}", f"{properties.name}, {memory}, sm_{properties.major}{properties.minor}"
        )
    if any(properties.major == 9 for properties in devices):
        yield _assembler()
    if not torch.cuda.is_available():
        built = f"torch built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch built for CPU"
        remedy = "training runs on the CPU"
        if shutil.which("nvidia-smi") is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            remedy = "reinstall torch with CUDA to use the GPU"
            if torch.version.cuda:
                remedy = "look at nvidia-smi: the driver does not work, or is too old for this torch"
                if visible is not None:
                    remedy = f"unset CUDA_VISIBLE_DEVICES={visible}, or {remedy}"
        yield Finding("cuda", f"no device ({built})", "optional", remedy)
    yield Finding("cpu", f"{len(os.sched_getaffinity(0))} cores")
    has_distributed = distributed.is_available()
    has_gloo = has_distributed and distributed.is_gloo_available()
    yield Finding("gloo", "yes") if has_gloo else Finding("gloo", "no", "missing", "reinstall torch")
    has_nccl = has_distributed and distributed.is_nccl_available()
    yield Finding("nccl", "yes") if has_nccl else Finding("nccl", "no", "optional", "GPUs only")


def _assembler() -> Finding:
    from megakernel.ops.kernels import assembler

    problem = assembler.problem(90)
    release = assembler.dotted(assembler.RELEASE)
    return Finding("ptxas", release, "missing" if problem else "good", problem or "")


def _system() -> Iterator[Finding]:
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # as Triton looks for it
    compiler = next(filter(None, map(shutil.which, names)), None)
    remedy = "Triton needs one on a GPU machine: apt-get install gcc, or let CC name one"
    yield Finding("C compiler", compiler or "none", "good" if compiler else "optional", remedy)
    free = shutil.disk_usage(".").free / 2**30
    # Weights, AdamW's moments and master weights: 12 in float32 without ZeRO, 14 in bfloat16, 16 in float32.
    remedy = (
        "a checkpoint needs 12 to 16 bytes per parameter, and a run holds checkpoint.keep and the one being written; "
        "set run.root to a folder on a larger disk"
    )
    yield Finding("disk here", f"{free:.0f} GiB free", "good" if free >= 5 else "optional", remedy)
    yield _slurm()


def _slurm() -> Finding:
    try:
        return Finding("Slurm", check_output("sbatch", "--version").strip())
    except SlurmRefused as error:
        is_installed = shutil.which("sbatch") is not None
        return Finding("Slurm", str(error) if is_installed else "none", "optional", "only for clusters")

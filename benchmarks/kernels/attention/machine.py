"""The limits of a device, measured on it: bytes per second and FLOP/s."""

import importlib
import os
import pkgutil
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata

import torch

from benchmarks.page import processor
from megakernel import ops
from megakernel.ops.dispatch import KERNELS

from .clock import fastest

COPIED = {"cuda": 2**30, "cpu": 2**27}
"""Bytes of a copy, far more than any cache holds."""

MULTIPLIED = {"cuda": 8192, "cpu": 2048}
"""Rows of square matrices, large enough for a matrix product to reach its peak."""


@dataclass(frozen=True)
class Machine:
    """A device and its limits."""

    name: str

    bandwidth: float
    """Bytes per second, reads and writes together."""

    peak: float
    """FLOP/s of matrix products in the measured dtype."""

    source: str
    """How both numbers were measured."""


def measure_limits(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure the device's limits: the fastest of several large copies and of several large matrix products."""
    copied, rows = COPIED[device.type], MULTIPLIED[device.type]
    kind = str(dtype).removeprefix("torch.")
    return Machine(
        device_name(device),
        2 * copied / _copy_seconds(device, copied),
        2 * rows**3 / _product_seconds(device, dtype, rows),
        f"the fastest copy of {copied / 2**20:.0f} MiB and {kind} product of {rows} x {rows} matrices in this run",
    )


def _copy_seconds(device: torch.device, count: int) -> float:
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return fastest(lambda: target.copy_(source), device)


def _product_seconds(device: torch.device, dtype: torch.dtype, rows: int) -> float:
    left, right = (torch.randn(rows, rows, device=device, dtype=dtype) for _ in range(2))
    return fastest(lambda: left @ right, device)


def device_name(device: torch.device) -> str:
    """The name that the device reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor()


def environment(device: torch.device) -> str:
    """Driver, threads, load, versions and kernels: whatever else affects times."""
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for package in ("triton", "flash-linear-attention"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    if device.type == "cuda":
        kernels = f"kernels of {', '.join(_ops_with_kernels()) or 'no op'}, the chunked ops elsewhere"
        return ", ".join([f"driver {_driver()}", f"CUDA {torch.version.cuda}", *versions, kernels])
    threads = f"{torch.get_num_threads()} thread(s) of {os.cpu_count()} cores"
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    return ", ".join([threads, f"load average {load}", *versions])


def _ops_with_kernels() -> list[str]:
    """Ops that have Triton kernels."""
    folders = (item.name for item in pkgutil.iter_modules(ops.__path__) if item.ispkg)
    modules = {name: importlib.import_module(f"megakernel.ops.{name}") for name in folders}
    return [name for name, module in modules.items() if KERNELS in getattr(module, "IMPLEMENTATIONS", {})]


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"

"""The assembler of kernels: ptxas, which turns the PTX that Triton writes into machine code.

Triton 3.6 and 3.7 come with ptxas 12.8. With it our kernels with several wgmma products, the matrix products of compute
capability 9.0, stopped with illegal addresses on an H200, or gave other numbers from run to run, depending on their
tiles. flash-linear-attention found ptxas to be the cause for its own kernels (its pull request 1262): 12.8 and 13.0
miscompile them, 13.1 does not. With 13.5, ours agreed with float64 on an H200. The package nvidia-cuda-nvcc of
Megakernel's extra `gpu` has it.
"""

import importlib.util
import os
from pathlib import Path

import torch
from triton import knobs

from megakernel.config.extras import install

VARIABLE = "TRITON_PTXAS_PATH"
"""Environment variable with the path of another ptxas than Triton's."""

FIRST_RIGHT = (13, 1)
"""The first release whose code for WGMMA_CAPABILITIES is right."""

WGMMA_CAPABILITIES = (90,)
"""Compute capabilities of GPUs with warpgroup matrix products (wgmma). 100 and 103 have other instructions, for which
Triton 3.7 does not compile all of the tiles of 90."""


def _of_package() -> Path | None:
    """The ptxas of the installed package nvidia-cuda-nvcc."""
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else spec.submodule_search_locations or []
    found = (path for place in places for path in sorted(Path(place).glob("cu*/bin/ptxas")))
    return next((path for path in found if os.access(path, os.X_OK)), None)


def capability_of_gpu(device: torch.device | None = None) -> int:
    """The compute capability of a GPU, 90 for 9.0; None: the current one."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def use_newer() -> None:
    """Let Triton use the ptxas of nvidia-cuda-nvcc, in this process and its children, unless VARIABLE names another.

    Triton's stays for other GPUs, for which a newer one spills more, and for a torch for CUDA 12, whose drivers do not
    load the newer one's code.
    """
    is_for_older = torch.version.cuda is not None and int(torch.version.cuda.split(".")[0]) < FIRST_RIGHT[0]
    is_other_gpu = torch.cuda.is_available() and capability_of_gpu() not in WGMMA_CAPABILITIES
    if not (os.environ.get(VARIABLE) or is_for_older or is_other_gpu) and (path := _of_package()):
        os.environ[VARIABLE] = str(path)


def dotted(release: tuple[int, ...]) -> str:
    """A release as people write it: 13.5."""
    return ".".join(map(str, release))


def release_in_use() -> tuple[int, ...]:
    """The release of the ptxas that Triton uses for compute capability 9.0: (13, 5)."""
    return tuple(int(part) for part in knobs.nvidia.ptxas.version.split("."))


use_newer()
RELEASE = release_in_use()
"""Found once, because `problem` is asked at every call of an op, and torch.compile traces it."""

_INSTALL = install("gpu")


def problem(capability: int) -> str | None:
    """Why kernels with matrix products would be wrong on GPUs of this compute capability; None if they are right."""
    if capability not in WGMMA_CAPABILITIES or RELEASE >= FIRST_RIGHT:
        return None
    return (
        f"ptxas {dotted(RELEASE)} miscompiles matrix products of compute capability {capability / 10}; expected at "
        f"least {dotted(FIRST_RIGHT)}: {_INSTALL}, or set {VARIABLE}"
    )

"""What a kernel becomes on a GPU that need not be there: registers, spills and shared memory of its machine code."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import mangle_type

from megakernel.ops.kernels.launch import Launch

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that one program may take, by compute capability."""


class Resources(NamedTuple):
    """What one program of a compiled kernel takes."""

    registers: int
    """Of a thread."""

    spilled: int
    """Bytes of a thread that went to local memory."""

    shared: int
    """Bytes of a program."""


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile a noted launch for a GPU of this capability (80, 90), as it would be at run time for these arguments."""
    kernel = launch.kernel
    signature, constants, attributes = {}, dict(launch.options), {}
    for index, (name, value) in enumerate(zip(kernel.arg_names, launch.arguments)):
        # As at run time: 1 is a constant of its own, and multiples of 16 are known to be.
        if isinstance(value, int) and value == 1:
            constants[name] = 1
            signature[name] = "constexpr"
            continue
        signature[name] = mangle_type(value)
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(launch.options, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    return _resources(triton.compile(source, target=target, options=options))


def _resources(compiled: CompiledKernel) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    taken = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", listing)}
    return Resources(taken["REG"], taken["STACK"] + taken["LOCAL"], compiled.metadata.shared)

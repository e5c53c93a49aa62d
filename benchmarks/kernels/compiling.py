"""Compile kernels for GPUs that need not be present: registers, spills and shared memory of the machine code."""

import ast
import hashlib
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, mangle_type

from benchmarks.kernels.races import overwritten_operands
from megakernel.ops.kernels import assembler
from megakernel.ops.kernels.launch import Launch

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that one program may take, by compute capability."""

SPILL_LIMIT = {80: 384, 90: 960, 100: 320, 120: 384}
"""Bytes per thread that may spill to local memory, by compute capability.

Smaller tiles, which spill nothing, take at least twice as long. Where there is wgmma, its tiles have at least 64 rows
and programs one warpgroup (`launch`): FLuRKA's gradient of queries at d = 128 then spills most. For 80 and 120 it is
`window_backward`, which loads all of a step at once: 50 bytes more there, and 8 % less time on an H200.
"""


ArgPath = tuple[int, ...]
"""Index of an argument among the parameters, followed by its indices inside of tuples."""


class Resources(NamedTuple):
    """Resources of one program of a compiled kernel."""

    registers: int
    """Registers per thread."""

    spilled: int
    """Bytes per thread in local memory."""

    shared: int
    """Bytes of shared memory per program."""

    overwritten: int
    """Copies that overwrite operands of products that still run, see `kernel_races`."""


@contextmanager
def assembler_for(capability: int) -> Iterator[None]:
    """Compile with the ptxas that is used on GPUs of this compute capability: see `kernels.assembler`."""
    with patch.dict(os.environ):
        if capability not in assembler.WGMMA_CAPABILITIES:
            os.environ.pop(assembler.VARIABLE, None)
        yield


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile a recorded launch for a compute capability (80, 90), as at run time with these arguments."""
    return resources(compile_kernel(launch, capability))


def compile_kernel(launch: Launch, capability: int) -> CompiledKernel:
    """The compiled kernel of a recorded launch, likewise."""
    with assembler_for(capability):
        return triton.compile(_source(launch), **_compile_arguments(launch, capability))


def ttir(launch: Launch, capability: int) -> str:
    """The TTIR of a recorded launch with its functions inlined: the computation before its layout for a GPU."""
    source, arguments = _source(launch), _compile_arguments(launch, capability)
    backend = make_backend(arguments["target"])
    options = backend.parse_options(arguments["options"])
    context = ir.context()
    stages: dict[str, Any] = {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    functions = (backend.get_codegen_implementation(options), backend.get_module_map())
    return str(stages["ttir"](source.make_ir(arguments["target"], options, *functions, context), {}))


def _source(launch: Launch) -> ASTSource:
    kernel = launch.kernel
    signature, constants, attributes = _specialized(launch)
    return ASTSource(kernel, signature, constexprs=constants, attrs=attributes)


def _compile_arguments(launch: Launch, capability: int) -> dict[str, Any]:
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    return {"target": GPUTarget("cuda", capability, 32), "options": options}


def fingerprint(launch: Launch, capability: int) -> str:
    """A hash (ten digits) of all inputs of `compile_launch`: launches with equal hashes compile to the same code."""
    sources: dict[str, str] = {}
    _collect_sources(launch.kernel, sources)
    limits = (launch.warps, launch.stages, None)  # as many registers as the compiler wants
    with assembler_for(capability):
        compiler = (triton.__version__, get_ptxas_version(capability))
    inputs = (*compiler, capability, *limits, *_specialized(launch))
    return hashlib.sha256(repr((sorted(sources.items()), inputs)).encode()).hexdigest()[:10]


def _collect_sources(function: JITFunction, sources: dict[str, str]) -> None:
    """Add the source of a kernel and of all functions and constants it uses, without comments and docstrings."""
    name = f"{function.__module__}.{function.__name__}"
    if name in sources:
        return
    tree = function.parse()
    body = tree.body[0].body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del body[0]
    sources[name] = ast.unparse(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name):
            continue
        value = function.__globals__.get(node.id)
        if isinstance(value, JITFunction):
            _collect_sources(value, sources)
        elif isinstance(value, tl.constexpr):
            sources[f"{name}: {node.id}"] = repr(value.value)


def _specialized(launch: Launch) -> tuple[dict[str, Any], dict[ArgPath, Any], dict[ArgPath, list]]:
    """Types by parameter, compile-time values by path, and attributes (divisibility) of the others by path."""
    names = launch.kernel.arg_names
    constants: dict[ArgPath, Any] = {(names.index(name),): value for name, value in launch.options.items()}
    attributes: dict[ArgPath, list] = {}

    def kind_of(value: Any, path: ArgPath) -> Any:
        if isinstance(value, tuple):
            kinds = tuple(kind_of(part, (*path, index)) for index, part in enumerate(value))
            return type(value)(*kinds) if hasattr(value, "_fields") else kinds
        # As Triton specializes at run time: on None and 1, and on divisibility by 16.
        if value is None or (isinstance(value, int) and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[path] = [["tt.divisibility", 16]]
        return mangle_type(value)

    signature = {}
    for parameter, value in zip(launch.kernel.params, launch.arguments):
        specialize = not parameter.do_not_specialize
        signature[parameter.name] = kind_of(value, (parameter.num,)) if specialize else mangle_type(value)
    return signature | dict.fromkeys(launch.options, "constexpr"), constants, attributes


def resources(compiled: CompiledKernel) -> Resources:
    """The resources of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        pathlib.Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", listing)}
    overwritten = len(overwritten_operands(compiled.asm["ttgir"]))
    return Resources(usage["REG"], usage["STACK"] + usage["LOCAL"], compiled.metadata.shared, overwritten)

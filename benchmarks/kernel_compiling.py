"""What a kernel becomes on a GPU that need not be there: registers, spills and shared memory of its machine code."""

import ast
import hashlib
import pathlib
import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, mangle_type

from megakernel.ops.kernels.launch import Launch

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that one program may take, by compute capability."""

SPILL_LIMIT = 320
"""Bytes of a thread that may go to local memory: smaller tiles, which spill nothing, take twice as long at best."""


Path = tuple[int, ...]
"""Where an argument stands among the parameters, and where in a tuple that it is part of."""


class Resources(NamedTuple):
    """Resources of one program of a compiled kernel."""

    registers: int
    """Registers of a thread."""

    spilled: int
    """Bytes of a thread that went to local memory."""

    shared: int
    """Bytes of a program."""


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile a noted launch for a GPU of this capability (80, 90), as it would be at run time for these arguments."""
    return resources(compiled(launch, capability))


def compiled(launch: Launch, capability: int) -> CompiledKernel:
    """The kernel of a noted launch, likewise."""
    return triton.compile(_source(launch), **_aim(launch, capability))


def intermediate(launch: Launch, capability: int) -> str:
    """The TTIR of a noted launch, its functions inlined: what it computes, before it is laid out for a GPU."""
    source, aim = _source(launch), _aim(launch, capability)
    backend = make_backend(aim["target"])
    options = backend.parse_options(aim["options"])
    context = ir.context()
    stages: dict[str, Any] = {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    functions = (backend.get_codegen_implementation(options), backend.get_module_map())
    return str(stages["ttir"](source.make_ir(aim["target"], options, *functions, context), {}))


def _source(launch: Launch) -> ASTSource:
    kernel = launch.kernel
    signature, constants, attributes = _specialized(launch)
    return ASTSource(kernel, signature, constexprs=constants, attrs=attributes)


def _aim(launch: Launch, capability: int) -> dict[str, Any]:
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    return {"target": GPUTarget("cuda", capability, 32), "options": options}


def fingerprint(launch: Launch, capability: int) -> str:
    """A hash, in ten digits, of all inputs of `compile_launch`: equal ones compile to the same code."""
    sources: dict[str, str] = {}
    _gather(launch.kernel, sources)
    told = (triton.__version__, capability, launch.warps, launch.stages, *_specialized(launch))
    return hashlib.sha256(repr((sorted(sources.items()), told)).encode()).hexdigest()[:10]


def _gather(function: JITFunction, found: dict[str, str]) -> None:
    """Add the text of a kernel, and of all that it calls or names, without comments and docstrings."""
    name = f"{function.__module__}.{function.__name__}"
    if name in found:
        return
    tree = function.parse()
    body = tree.body[0].body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del body[0]
    found[name] = ast.unparse(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name):
            continue
        value = function.__globals__.get(node.id)
        if isinstance(value, JITFunction):
            _gather(value, found)
        elif isinstance(value, tl.constexpr):
            found[f"{name}: {node.id}"] = repr(value.value)


def _specialized(launch: Launch) -> tuple[dict[str, Any], dict[Path, Any], dict[Path, list]]:
    """Types by parameter, compile-time values by path, and what is known of the others."""
    names = launch.kernel.arg_names
    constants: dict[Path, Any] = {(names.index(name),): value for name, value in launch.options.items()}
    attributes: dict[Path, list] = {}

    def kind_of(value: Any, path: Path) -> Any:
        if isinstance(value, tuple):
            kinds = tuple(kind_of(part, (*path, index)) for index, part in enumerate(value))
            return type(value)(*kinds) if hasattr(value, "_fields") else kinds
        # As at run time: 1 is a constant of its own, and multiples of 16 are known to be.
        if value is None or (isinstance(value, int) and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[path] = [["tt.divisibility", 16]]
        return mangle_type(value)

    signature = {}
    for parameter, given in zip(launch.kernel.params, launch.arguments):
        known = not parameter.do_not_specialize
        signature[parameter.name] = kind_of(given, (parameter.num,)) if known else mangle_type(given)
    return signature | dict.fromkeys(launch.options, "constexpr"), constants, attributes


def taken_apart(compiled: CompiledKernel, *command: str) -> str:
    """What a program of the CUDA toolkit prints of a compiled kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        pathlib.Path(file.name).write_bytes(compiled.asm["cubin"])
        return subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout


def resources(compiled: CompiledKernel) -> Resources:
    """The resources of a compiled kernel."""
    listing = taken_apart(compiled, knobs.nvidia.cuobjdump.path, "-res-usage")
    taken = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", listing)}
    return Resources(taken["REG"], taken["STACK"] + taken["LOCAL"], compiled.metadata.shared)

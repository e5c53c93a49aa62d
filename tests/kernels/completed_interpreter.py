"""Adds to Triton's interpreter what it lacks and the kernels of other libraries need."""

import builtins
from importlib import import_module

import numpy as np
import triton.language as tl
from triton.runtime import autotuner, interpreter


def complete(monkeypatch) -> None:
    """For Liger-Kernel's norms: float arguments become float32 scalars with methods, and libdevice gets `rsqrt`."""
    from liger_kernel.ops import fused_add_rms_norm, layer_norm, rms_norm

    converted = interpreter._implicit_cvt

    def convert(argument):
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return converted(argument)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert)
    for module in (rms_norm, fused_add_rms_norm, layer_norm):
        # `tl.rsqrt` is looked up when a kernel runs, after the interpreter has replaced it.
        monkeypatch.setattr(module, "rsqrt", lambda x: tl.rsqrt(x))


class Counter(int):
    """A loop counter with the method `to`, as in compiled code."""

    def to(self, dtype):
        return self


def complete_for_fla(monkeypatch) -> None:
    """For flash-linear-attention: no autotuning, loop counters with methods, arithmetic of bfloat16."""
    builder, run = interpreter.interpreter_builder, autotuner.Autotuner.run
    dot, binary, reduce = builder.create_dot, builder.binary_op, interpreter.ReduceOps.sum

    def run_first(self, *args, **kwargs):
        monkeypatch.setattr(self, "configs", self.configs[:1])
        return run(self, *args, **kwargs)

    def arithmetic(a, b, operation):
        if a.dtype.scalar != tl.bfloat16:
            return binary(a, b, operation)
        result = binary(_widened(a), _widened(b), operation)
        if result.dtype.scalar != tl.float32:
            return result
        rounded = interpreter._convert_float(result.data, tl.float32, tl.bfloat16, None)
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    def summed(self, x):
        if x.dtype == tl.bfloat16:
            x = tl.core.tensor(_widened(x.handle), tl.block_type(tl.float32, list(x.shape)))
        return reduce(self, x)

    counted = lambda *bounds: map(Counter, builtins.range(*map(int, bounds)))  # noqa: E731
    monkeypatch.setattr(autotuner.Autotuner, "run", run_first)
    monkeypatch.setattr(interpreter.ReduceOps, "sum", summed)
    monkeypatch.setattr(builder, "binary_op", arithmetic, raising=False)
    monkeypatch.setattr(
        builder, "create_dot", lambda a, b, *rest: dot(_widened(a), _widened(b), *rest), raising=False
    )
    for name in (
        "common.chunk_h",
        "common.chunk_o",
        "common.chunk_delta_h",
        "common.fused_chunk",
        "utils.cumsum",
    ):
        monkeypatch.setattr(import_module(f"fla.ops.{name}"), "range", counted, raising=False)


def _widened(x):
    """A bfloat16 tensor, which the interpreter stores as integers, in float32."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << np.uint32(16)).view(np.float32), tl.float32)

"""Adds to Triton's interpreter what it lacks and Liger-Kernel's norms need."""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def complete(monkeypatch) -> None:
    """Float arguments of kernels become float32 scalars with methods, and libdevice gets `rsqrt`."""
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

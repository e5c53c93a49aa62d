"""What Triton's interpreter lacks of its compiler and liger-kernel's norms use."""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def complete(monkeypatch) -> None:
    """Numbers given to a kernel become float32 scalars with methods, and libdevice gets a reciprocal root."""
    from liger_kernel.ops import layer_norm, rms_norm

    converted = interpreter._implicit_cvt

    def convert(argument):
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return converted(argument)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert)
    for module in (rms_norm, layer_norm):
        # Looked up when a kernel runs, which is when the interpreter has put its own in place.
        monkeypatch.setattr(module, "rsqrt", lambda x: tl.rsqrt(x))

"""Makes Triton's interpreter faster, and its conversions to bfloat16 those of a GPU.

The interpreter spends its time not on numbers but on their types: it looks up and builds the same few shapes and dtypes
at every operation, thousands of times per kernel. Here each is built once. It also computes every sum and product of
32-bit integers again in 64 bits, for an assertion that it then ignores unless told to debug. And it converts to
bfloat16 bit by bit and by truncation, GPUs to the nearest number, of two equally near ones to the even one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


@contextmanager
def faster() -> Iterator[None]:
    """Within it, kernels run in the faster interpreter."""
    # By default, the interpreter walks through the language at every call of a device function.
    patch_language = interpreter._patch_lang
    patched = patch_language(SimpleNamespace(__globals__={"tl": tl, "core": core}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
        builder = interpreter.interpreter_builder
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter, "_get_np_dtype", _numpy_dtype_of(interpreter._get_np_dtype))
        patch.setattr(interpreter, "_convert_float", _conversion(interpreter._convert_float))
        patch.setattr(core.block_type, "__init__", _block_type)
        patch.setattr(core.tensor, "__init__", _tensor)
        yield
    patched.restore()


def _numpy_dtype_of(find: Any) -> Any:
    found: dict[str, Any] = {}

    def numpy_dtype(dtype: core.dtype) -> Any:
        # Block types have no hash, and the hash of a dtype takes as long as the search.
        name = dtype.scalar.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    return numpy_dtype


def _conversion(convert: Any) -> Any:
    def converted(x: np.ndarray, of: core.dtype, to: core.dtype, rounding: Any) -> np.ndarray:
        if (of, to) == (core.bfloat16, core.float32):
            return x.astype(np.uint32) << np.uint32(16)
        if (of, to) == (core.float32, core.bfloat16):
            bits = np.ascontiguousarray(x).view(np.uint32)
            half = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
            rounded = np.where(np.isnan(x), np.uint32(0x7FC0_0000), bits + half)
            return (rounded >> np.uint32(16)).astype(np.uint16)
        return convert(x, of, to, rounding)

    return converted


class _Shape(NamedTuple):
    """The shape of a block type, that of a tensor, and the number of elements for both."""

    of_block: core.tuple
    of_tensor: core.tuple
    count: int
    numel: core.constexpr


@cache
def _shape(sizes: tuple[int, ...]) -> _Shape:
    count = core.validate_block_shape(sizes)
    shapes = core.tuple(sizes), core.tuple(map(core.constexpr, sizes))
    for shape in shapes:
        shape.sizes = sizes
    return _Shape(*shapes, count, core.constexpr(count))


def _block_type(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
    sizes = getattr(shape, "sizes", None) or tuple(map(core._unwrap_if_constexpr, shape))
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, _, self.numel, _ = _shape(sizes)
    self.name = f"<{sizes}, {element_ty.name}>"


_NO_SIZES, _ONE = core.tuple(()), core.constexpr(1)


def _tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _NO_SIZES, _ONE
    if type.is_block():
        _, self.shape, _, self.numel = _shape(type.shape.sizes)

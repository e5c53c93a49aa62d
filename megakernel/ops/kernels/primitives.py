"""Device functions that all kernels use: rounding, loads and stores of rows, products; and sizes of tiles."""

import triton
import triton.language as tl
from triton import knobs

from megakernel.ops import state

EMPTY = tl.constexpr(state.EMPTY)

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), which has bfloat16 only as a storage format."""


def cdiv(size: int, part: int) -> int:
    """Ceiling division. Triton's `cdiv` is a compiler function that takes microseconds on the host."""
    return -(-size // part)


def power_of_two(size: int) -> int:
    """The smallest power of two that is >= `size`; `size` >= 1."""
    return 1 << (size - 1).bit_length()


def padded(size: int) -> int:
    """`size` padded to a power of two that matrix products of tiles support, at least 16."""
    return max(16, power_of_two(size))


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """`x` rounded to the nearest number of `dtype`.

    The interpreter would truncate, and multiply the bits of bfloat16 as integers. There, x is rounded by hand and stays
    float32, so that products and sums match the device's.
    """
    if INTERPRETED:
        x = x.to(tl.float32)
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            x = bits.to(tl.float32, bitcast=True)
        elif dtype == tl.float16:
            x = x.to(tl.float16).to(tl.float32)
        return x
    return x.to(dtype)


@triton.jit
def materialize(x):
    """`x`, computed here and kept: otherwise the compiler recomputes features for every layout that uses them."""
    if INTERPRETED:
        y = x
    elif x.dtype.primitive_bitwidth == 16:
        y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    return y


@triton.jit
def exp2(x):
    """2^x of a float32 tile; subnormal results are 0, since keeping them costs three more instructions."""
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def exp(x):
    """e^x of a float32 tile, see `exp2`."""
    return exp2(x * 1.4426950408889634)


@triton.jit
def row_ptrs(start, stride, num_valid, C: tl.constexpr, D, DP: tl.constexpr):
    """Pointers (C, DP) to the first C rows of a matrix at `start`, and a mask of the elements that exist.

    Pointers to missing rows depend on `num_valid` on purpose: it changes from chunk to chunk, which keeps the compiler
    from computing the offsets of every tile before the loop and holding them in registers.
    """
    rows, columns = tl.arange(0, C), tl.arange(0, DP)
    inside = (rows < num_valid)[:, None] & (columns < D)[None, :]
    return start + (tl.minimum(rows, num_valid - 1)[:, None] * stride + columns[None, :]), inside


@triton.jit
def load_rows(start, stride, num_valid, C: tl.constexpr, D, DP: tl.constexpr):
    """The first C rows of a matrix at `start`, as a tile (C, DP); zeros from row `num_valid` and column D on.

    Kernels load all that a step needs before its first product or `materialize`: the compiler moves no load across
    these, and each would wait for memory on its own.
    """
    ptrs, inside = row_ptrs(start, stride, num_valid, C, D, DP)
    return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def store_rows(start, stride, num_valid, x, D, DP: tl.constexpr):
    """The inverse of `load_rows`."""
    ptrs, inside = row_ptrs(start, stride, num_valid, x.shape[0], D, DP)
    tl.store(ptrs, rounded(x, start.dtype.element_ty), mask=inside)


@triton.jit
def dot(a, b, dtype: tl.constexpr):
    """The matrix product a b accumulated in float32, operands rounded to `dtype`; float32 keeps its precision."""
    return tl.dot(rounded(a, dtype), rounded(b, dtype), input_precision="tf32x3")

"""Feature maps inside a Triton kernel: phi of a tile of tokens in registers, and its gradient.

phi(x) = values * exp(logs), as in `megakernel.ops.feature_maps`; logs are the stabilizers of unbounded maps, one per
token and constant to differentiation, and 0 for the others. Maps with two halves (hedgehog, rks) interleave them:
feature 2 m + h is component m of half h, so that a half is a register permutation away.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from megakernel.ops.feature_maps import FeatureMap, named

EMPTY = tl.constexpr(-1e30)
"""Log scale of a sum without terms; `megakernel.ops.state.EMPTY`."""

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), which knows bfloat16 as a storage format only."""

ELEMENTWISE = ("identity", "relu", "elu")
TWO_HALVES = ("hedgehog", "rks")
UNBOUNDED = ("favor", "prf")
SUPPORTED = (*ELEMENTWISE, *TWO_HALVES, *UNBOUNDED)


class Phi(NamedTuple):
    """A feature map as kernels take it."""

    name: str
    width: int
    """d of the tokens."""

    rows: int
    """M, the rows of the projection; d for maps without one."""

    scale: float
    """What tokens are multiplied by first: d^-1/4 for estimates of exp(q.k / sqrt(d)), else 1."""

    coefficient: float
    """What features are multiplied by: sqrt(C / M) for C Gaussians of M samples together, else 1."""

    @property
    def features(self) -> int:
        """F."""
        return self.rows * (2 if self.name in TWO_HALVES else 1)

    @property
    def padded_width(self) -> int:
        """d as the power of two that a tile has."""
        return padded(self.width)

    @property
    def padded_rows(self) -> int:
        """M likewise."""
        return padded(self.rows)

    @property
    def padded_features(self) -> int:
        """F likewise."""
        return self.padded_rows * (2 if self.name in TWO_HALVES else 1)

    @property
    def unbounded(self) -> bool:
        """Whether tokens have a log scale."""
        return self.name in UNBOUNDED

    @property
    def projected(self) -> bool:
        """Whether the map takes a matrix."""
        return self.name not in ELEMENTWISE

    def options(self) -> dict[str, object]:
        """The compile-time arguments that every kernel with a feature map has."""
        return {
            "MAP": self.name,
            "D": self.width,
            "DP": self.padded_width,
            "M": self.rows,
            "MP": self.padded_rows,
            "FP": self.padded_features,
            "SCALE": self.scale,
            "COEFFICIENT": self.coefficient,
            "UNBOUNDED": self.unbounded,
        }


def padded(size: int) -> int:
    """The smallest power of two that a matrix product of tiles takes."""
    return max(16, triton.next_power_of_2(size))


def phi_of(feature_map: FeatureMap | str, width: int, rows: int | None) -> Phi:
    """The map of tokens of `width` d with a projection of `rows` M, None without one."""
    form = named(feature_map)
    if form.name in ELEMENTWISE:
        return Phi(form.name, width, width, 1.0, form.components**0.5)
    assert rows is not None
    sampled = form.name != "hedgehog"
    coefficient = math.sqrt(form.components / rows) if sampled else form.components**0.5
    return Phi(form.name, width, rows, width**-0.25 if sampled else 1.0, coefficient)


def split_matrix(projection: Tensor | None, heads: int, dtype: torch.dtype) -> Tensor | None:
    """A projection (M, d) or (H_kv, M, d) as (2, H_kv, M, d) in `dtype`: its values, and what rounding took off them.

    An exponent of size 30 must not be off by the 2^-9 of bfloat16; two terms bring that to 2^-17, on tensor cores.
    """
    if projection is None:
        return None
    whole = projection.expand(heads, -1, -1) if projection.dim() == 2 else projection
    high = whole.to(dtype)
    low = (whole - high.to(whole.dtype)).to(dtype)
    return torch.stack([high, low])


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """`x` rounded to the nearest number of `dtype`.

    The interpreter would cut digits off and multiply the bits of bfloat16 as integers: there, the numbers are rounded
    by hand and stay float32, so that products and sums are the device's.
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
def load_rows(start, rows, stride, count, D: tl.constexpr, DP: tl.constexpr):
    """Rows (C, DP) of a matrix with D columns, zeros outside."""
    columns = tl.arange(0, DP)
    inside = (rows < count)[:, None] & (columns < D)[None, :]
    return tl.load(start + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(start, rows, stride, count, x, D: tl.constexpr, DP: tl.constexpr):
    """The inverse of `load_rows`."""
    columns = tl.arange(0, DP)
    inside = (rows < count)[:, None] & (columns < D)[None, :]
    x = rounded(x, start.dtype.element_ty)
    tl.store(start + rows.to(tl.int64)[:, None] * stride + columns[None, :], x, mask=inside)


@triton.jit
def dot(a, b, dtype: tl.constexpr):
    """a b summed in float32, the factors rounded to `dtype`; float32 factors keep their precision."""
    return tl.dot(rounded(a, dtype), rounded(b, dtype), input_precision="tf32x3")


@triton.jit
def project(x, matrix, low, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, MP: tl.constexpr):
    """x (C, DP) times the transposed matrix (M, D): (C, MP) float32. `low` is the distance to the second term."""
    m = tl.arange(0, MP)
    d = tl.arange(0, DP)
    inside = (d < D)[:, None] & (m < M)[None, :]
    places = matrix + m[None, :] * D + d[:, None]
    y = dot(x, tl.load(places, mask=inside, other=0.0), x.dtype)
    if x.dtype != tl.float32:
        y += dot(x, tl.load(places + low, mask=inside, other=0.0), x.dtype)
    return y


@triton.jit
def interleave(a, b):
    """(C, M) and (C, M) -> (C, 2 M)."""
    return tl.reshape(tl.join(a, b), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def halves(x):
    """The inverse of `interleave`."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def cos_sin(x):
    """cos x and sin x to 1e-6 for |x| up to 1e4.

    The library's functions keep a table in local memory for huge arguments, which features do not have.
    """
    turns = tl.floor(x * 0.6366197723675814 + 0.5)
    # pi / 2 in three parts of few bits: products with a small integer are exact.
    r = x - turns * 1.5703125
    r = r - turns * 4.837512969970703125e-4
    r = r - turns * 7.549789948768648e-8
    r2 = r * r
    sine = r + r * r2 * (-1.6666654611e-1 + r2 * (8.3321608736e-3 - r2 * 1.9515295891e-4))
    cosine = (
        1
        - r2 / 2
        + r2 * r2 * (4.166664568298827e-2 + r2 * (-1.388731625493765e-3 + r2 * 2.443315711809948e-5))
    )
    quarter = turns.to(tl.int32) & 3
    odd = (quarter & 1) == 1
    flip_cos = (quarter == 1) | (quarter == 2)
    cos = tl.where(odd, sine, cosine)
    sin = tl.where(odd, cosine, sine)
    return tl.where(flip_cos, -cos, cos), tl.where(quarter >= 2, -sin, sin)


@triton.jit
def softmax(y, inside):
    """Rows of exp(y) that add up to 1 over the columns `inside`."""
    y = tl.where(inside, y, float("-inf"))
    e = tl.exp(y - tl.max(y, 1)[:, None])
    return e / tl.sum(e, 1)[:, None]


@triton.jit
def phi(
    x,
    matrix,
    low,
    MAP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    SCALE: tl.constexpr,
    COEFFICIENT: tl.constexpr,
):
    """Features of tokens x (C, DP): values (C, FP) float32, 0 in padding, and logs (C,)."""
    logs = tl.zeros((x.shape[0],), tl.float32)
    inside = (tl.arange(0, MP) < M)[None, :]
    if MAP == "identity":
        values = x.to(tl.float32)
    elif MAP == "relu":
        values = tl.maximum(x.to(tl.float32), 0.0)
    elif MAP == "elu":
        y = x.to(tl.float32)
        values = tl.where(inside, tl.exp(tl.minimum(y, 0.0)) + tl.maximum(y, 0.0), 0.0)
    else:
        y = project(x, matrix, low, D, DP, M, MP)
        if MAP == "hedgehog":
            values = interleave(softmax(y, inside), softmax(-y, inside))
        elif MAP == "rks":
            cos, sin = cos_sin(y * SCALE)
            values = interleave(tl.where(inside, cos, 0.0), tl.where(inside, sin, 0.0))
        else:
            wide = x.to(tl.float32)
            # |x|^2 / 2 estimates exp(q.k / sqrt(d)), |x|^2 a Gaussian kernel (KL eq. 9).
            square = tl.sum(wide * wide, 1) * (SCALE * SCALE * (0.5 if MAP == "favor" else 1.0))
            y = tl.where(inside, y * SCALE - square[:, None], float("-inf"))
            logs = tl.max(y, 1)
            values = tl.exp(y - logs[:, None])
    return values * COEFFICIENT, logs


@triton.jit
def phi_gradient(
    x,
    values,
    grad,
    matrix,
    MAP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    SCALE: tl.constexpr,
    COEFFICIENT: tl.constexpr,
):
    """Gradients in x (C, DP) and in its projection (C, MP), float32, given that in the values (C, FP) of `phi`.

    For maps without a projection the two are one.
    """
    wide = x.to(tl.float32)
    if MAP == "identity":
        dy = grad * COEFFICIENT
        dx = dy
    elif MAP == "relu":
        dy = tl.where(wide > 0, grad * COEFFICIENT, 0.0)
        dx = dy
    elif MAP == "elu":
        dy = tl.where(wide > 0, grad * COEFFICIENT, grad * values)
        dx = dy
    else:
        weighted = grad * values
        if MAP == "hedgehog":
            rising, falling = halves(values / COEFFICIENT)
            up, down = halves(weighted)
            dy = up - rising * tl.sum(up, 1)[:, None] - down + falling * tl.sum(down, 1)[:, None]
        elif MAP == "rks":
            cos, sin = halves(values)
            of_cos, of_sin = halves(grad)
            dy = (of_sin * cos - of_cos * sin) * SCALE
        else:
            dy = weighted * SCALE
        m = tl.arange(0, MP)
        d = tl.arange(0, DP)
        inside = (m < M)[:, None] & (d < D)[None, :]
        dx = dot(dy, tl.load(matrix + m[:, None] * D + d[None, :], mask=inside, other=0.0), x.dtype)
        if MAP == "favor" or MAP == "prf":
            twice: tl.constexpr = SCALE * SCALE * (1.0 if MAP == "favor" else 2.0)
            dx -= wide * (tl.sum(weighted, 1) * twice)[:, None]
    return dx, dy

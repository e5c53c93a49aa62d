"""Feature maps inside Triton kernels: phi of a tile of tokens in registers, and its gradient.

phi(x) = values * exp(logs), as in `megakernel.ops.feature_maps`; logs are the stabilizers of unbounded maps, one per
token and constants to differentiation; for other maps they are 0. Maps with two halves (hedgehog, rks) keep them in two
tiles, so that no program rearranges registers; for other maps, the second tile is unused and equals the first.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megakernel.ops.feature_maps import FEATURE_MAPS, Map, named
from megakernel.ops.kernels.primitives import dot, exp, exp2, load_rows, padded, store_rows

SUPPORTED = ("identity", "relu", "elu", "hedgehog", "rks", "favor", "prf")
"""Maps that `phi` computes and `store_dx` differentiates; others run without kernels."""


class Phi(NamedTuple):
    """A feature map as a compile-time argument of kernels."""

    name: str
    width: int
    """d of the tokens."""

    rows: int
    """M, the rows of the projection; d for maps without one."""

    scale: float
    """Factor of tokens before the map: d^-1/4 for estimates of exp(q.k / sqrt(d)), else 1."""

    coefficient: float
    """Factor of features: sqrt(C / M) for C Gaussians with M samples in total, else 1."""

    decays: bool = False
    """Whether keys have log scales for a decaying state."""

    max_block_d: int = 32
    """Upper bound of `block_d`."""

    @property
    def block_d(self) -> int:
        """Columns of tokens and projection per step of their product."""
        return min(self.max_block_d, self.padded_width)

    @property
    def halves(self) -> int:
        """1, or 2 if features have two halves."""
        return FEATURE_MAPS[self.name].halves

    @property
    def has_two_halves(self) -> bool:
        """Whether features have two halves."""
        return self.halves == 2

    @property
    def features(self) -> int:
        """F."""
        return self.rows * self.halves

    @property
    def padded_width(self) -> int:
        """d padded to the power of two of a tile."""
        return padded(self.width)

    @property
    def padded_rows(self) -> int:
        """M padded to the power of two of a tile."""
        return padded(self.rows)

    @property
    def padded_features(self) -> int:
        """Features in padded halves."""
        return self.padded_rows * self.halves

    @property
    def unbounded(self) -> bool:
        """Whether tokens have a log scale."""
        return self.decays or self.gaussian

    @property
    def gaussian(self) -> bool:
        """Whether features are exponentials, divided by each token's largest one."""
        return FEATURE_MAPS[self.name].unbounded

    @property
    def least(self) -> float:
        """A query's sum of weights below this counts as 0, see `megakernel.ops.partial_output`."""
        tiny = torch.finfo(torch.float32).tiny
        return tiny**0.5 if self.unbounded else tiny

    @property
    def projected(self) -> bool:
        """Whether the map has a projection."""
        return FEATURE_MAPS[self.name].projected


def phi_of(feature_map: Map | str, width: int, rows: int | None, decays: bool = False) -> Phi:
    """The map for tokens of width d and a projection with M `rows`, None without one."""
    feature_map = named(feature_map)
    form = FEATURE_MAPS[feature_map.name]
    if not form.projected:
        return Phi(feature_map.name, width, width, 1.0, feature_map.components**0.5, decays)
    assert rows is not None
    coefficient = math.sqrt(feature_map.components / rows) if form.sampled else feature_map.components**0.5
    return Phi(feature_map.name, width, rows, width**-0.25 if form.sampled else 1.0, coefficient, decays)


@triton.jit
def project(x, stride, num_valid, matrix, low, C: tl.constexpr, PHI: tl.constexpr):
    """C tokens at `x` times the transposed matrix (M, D), (C, MP) float32, and the squared norms of the tokens (C,).

    `low` is the offset of the matrix's second term, None for a single one. The loop takes PHI.block_d columns at once:
    a whole matrix would fill all registers.
    """
    MP: tl.constexpr = PHI.padded_rows
    dtype: tl.constexpr = matrix.dtype.element_ty
    tl.static_assert(low is None or dtype != tl.float32, "a float32 matrix has a single term")
    m = tl.arange(0, PHI.padded_rows)
    y = tl.zeros((C, MP), tl.float32)
    square = tl.zeros((C,), tl.float32)
    # If squares need `b_x`, Triton 3.6 and 3.7 would pipeline it into too few buffers and overwrite it while a product
    # still reads it (triton-lang/triton, issue 6691).
    for first in tl.range(0, PHI.padded_width, PHI.block_d, num_stages=1 if PHI.gaussian else None):
        b_x = load_rows(x + first, stride, num_valid, C, PHI.width - first, PHI.block_d)
        d = first + tl.arange(0, PHI.block_d)
        inside = (m < PHI.rows)[:, None] & (d < PHI.width)[None, :]
        ptrs = matrix + (m[:, None] * PHI.width + d[None, :])
        b_w = tl.load(ptrs, mask=inside, other=0.0)
        b_w_low = None
        if low is not None:
            # Loaded before the first product: the compiler moves no load across one.
            b_w_low = tl.load(ptrs + low, mask=inside, other=0.0)
        y += dot(b_x, tl.trans(b_w), dtype)
        if b_w_low is not None:
            y += dot(b_x, tl.trans(b_w_low), dtype)
        exact = b_x.to(tl.float32)
        square += tl.sum(exact * exact, 1)
    return y, square


@triton.jit
def cos_sin(x):
    """cos x and sin x to 1e-6 for |x| up to 1e4.

    CUDA's functions keep a table in local memory for huge arguments, which do not occur here.
    """
    turns = tl.floor(x * 0.6366197723675814 + 0.5)
    # pi / 2 in three parts with few bits each, so that products with a small integer are exact.
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
    """Softmax of the rows of y over the columns `inside`."""
    LOG2E: tl.constexpr = 1.4426950408889634
    y = tl.where(inside, y, float("-inf"))
    e = exp2(y * LOG2E - (tl.max(y, 1) * LOG2E)[:, None])
    return e * (1 / tl.sum(e, 1))[:, None]


@triton.jit
def phi(x, stride, num_valid, matrix, low, C: tl.constexpr, PHI: tl.constexpr):
    """Features of C tokens at `x`, 0 from row `num_valid` on: halves (C, MP) float32, 0 in padding, and logs (C,)."""
    logs = tl.zeros((C,), tl.float32)
    inside = (tl.arange(0, PHI.padded_rows) < PHI.rows)[None, :]
    if PHI.name == "identity" or PHI.name == "relu" or PHI.name == "elu":
        a = load_rows(x, stride, num_valid, C, PHI.width, PHI.padded_width).to(tl.float32)
        if PHI.name == "relu":
            a = tl.maximum(a, 0.0)
        elif PHI.name == "elu":
            # Not (exp(x) - 1) + 1 for negative x, which cancels.
            a = exp(tl.minimum(a, 0.0)) + tl.maximum(a, 0.0)
            if PHI.rows != PHI.padded_rows:
                a = tl.where(inside, a, 0.0)
        b = a
    else:
        y, square = project(x, stride, num_valid, matrix, low, C, PHI)
        if PHI.name == "hedgehog":
            a = softmax(y, inside)
            b = softmax(-y, inside)
        elif PHI.name == "rks":
            cos, sin = cos_sin(y * PHI.scale)
            a = tl.where(inside, cos, 0.0)
            b = tl.where(inside, sin, 0.0)
        else:
            tl.static_assert(PHI.gaussian, "a map that kernels do not know")
            # |x|^2 / 2 estimates exp(q.k / sqrt(d)), |x|^2 a Gaussian kernel (KL eq. 9).
            square *= PHI.scale * PHI.scale * (0.5 if PHI.name == "favor" else 1.0)
            y = tl.where(inside, y * PHI.scale - square[:, None], float("-inf"))
            logs = tl.max(y, 1)
            a = exp(y - logs[:, None])
            b = a
    return a * PHI.coefficient, b * PHI.coefficient, logs


@triton.jit
def dproj_of_half(half: tl.constexpr, dphi, this_half, other_half, PHI: tl.constexpr):
    """What the gradient (C, MP) of one half of the features adds to the `dproj` that `store_dx` takes.

    dphi: gradient of `this_half`. Halves come one at a time: both of 256 features would fill the registers.
    """
    if PHI.name == "hedgehog":
        dproj = this_half * (dphi - (tl.sum(dphi * this_half, 1) / PHI.coefficient)[:, None])
        if half:
            dproj = -dproj
    elif PHI.name == "rks":
        dproj = dphi * other_half * (PHI.scale if half else -PHI.scale)
    elif PHI.projected:
        dproj = dphi * this_half * PHI.scale
    else:
        dproj = dphi
    return dproj


@triton.jit
def store_dx(
    x,
    stride,
    num_valid,
    matrix,
    dproj,
    dx,
    dx_row,
    p_dproj,
    C: tl.constexpr,
    LEARNED: tl.constexpr,
    PHI: tl.constexpr,
    MORE: tl.constexpr = False,
):
    """Store the gradients of the C tokens at `x`, in rows that are `dx_row` elements apart, at `dx`.

    dproj: gradients of the projected tokens; for maps without a projection, of the features. If the projection is
    LEARNED, it is also stored, in rows of M at `p_dproj`, for its gradient. With MORE, gradients are added to those
    already at `dx`, which must have been stored before a barrier.
    """
    if not PHI.projected:
        b_dx = dproj * PHI.coefficient
        if PHI.name != "identity":
            tl.static_assert(
                PHI.name == "relu" or PHI.name == "elu", "a map whose gradient kernels do not know"
            )
            b_x = load_rows(x, stride, num_valid, C, PHI.width, PHI.padded_width).to(tl.float32)
            # Computed from the token rather than from its features, which would need registers.
            b_dx = tl.where(b_x > 0, b_dx, b_dx * exp(tl.minimum(b_x, 0.0)) if PHI.name == "elu" else 0.0)
        if MORE:
            b_dx += load_rows(dx, dx_row, num_valid, C, PHI.width, PHI.padded_width).to(tl.float32)
        store_rows(dx, dx_row, num_valid, b_dx, PHI.width, PHI.padded_width)
    else:
        if LEARNED:
            store_rows(p_dproj, PHI.rows, num_valid, dproj, PHI.rows, PHI.padded_rows)
        dproj_sum = tl.sum(dproj, 1) * (PHI.scale * (1.0 if PHI.name == "favor" else 2.0))
        m = tl.arange(0, PHI.padded_rows)
        for first in range(0, PHI.padded_width, PHI.block_d):
            d = first + tl.arange(0, PHI.block_d)
            inside = (m < PHI.rows)[:, None] & (d < PHI.width)[None, :]
            ptrs = matrix + (m[:, None] * PHI.width + d[None, :])
            b_dx = dot(dproj, tl.load(ptrs, mask=inside, other=0.0), x.dtype.element_ty)
            if PHI.gaussian:
                b_x = load_rows(x + first, stride, num_valid, C, PHI.width - first, PHI.block_d).to(
                    tl.float32
                )
                b_dx -= b_x * dproj_sum[:, None]
            if MORE:
                b_dx += load_rows(dx + first, dx_row, num_valid, C, PHI.width - first, PHI.block_d).to(
                    tl.float32
                )
            store_rows(dx + first, dx_row, num_valid, b_dx, PHI.width - first, PHI.block_d)


@triton.jit
def store_dx_from_dphi(
    x,
    stride,
    num_valid,
    matrix,
    phi1,
    phi2,
    dphi1,
    dphi2,
    dx,
    dx_row,
    p_dproj,
    C: tl.constexpr,
    LEARNED: tl.constexpr,
    PHI: tl.constexpr,
    MORE: tl.constexpr = False,
):
    """`store_dx`, given the gradients of both halves (C, MP) of the features."""
    dproj = dproj_of_half(0, dphi1, phi1, phi2, PHI)
    if PHI.has_two_halves:
        dproj += dproj_of_half(1, dphi2, phi2, phi1, PHI)
    store_dx(x, stride, num_valid, matrix, dproj, dx, dx_row, p_dproj, C, LEARNED, PHI, MORE)

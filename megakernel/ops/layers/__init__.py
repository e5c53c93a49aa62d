"""Ops of a transformer layer besides attention: norms, SwiGLU and rotary embedding.

torch runs each as several passes over the tokens. On a GPU, Liger-Kernel's fused kernels run instead if the package is
installed (extra `gpu`).
"""

from types import ModuleType
from typing import cast

from torch import Tensor

from megakernel.ops.dispatch import Implementation, Kernels, choose
from megakernel.ops.layers import plain


def load_liger() -> ModuleType:
    """The module of Liger-Kernel implementations, imported when one is chosen."""
    from megakernel.ops.layers import liger

    return liger


def _implementations(formula: Implementation) -> dict[str, Implementation]:
    """Backend -> implementation; the formulas of `plain` are also the reference."""
    name = formula.__name__
    return {"chunked": formula, "reference": formula, "liger": Kernels(name, load_liger, name)}


RMS_NORM = _implementations(plain.rms_norm)
RMS_NORM_AND_RESIDUAL = _implementations(plain.rms_norm_and_residual)
ADD_RMS_NORM = _implementations(plain.add_rms_norm)
LAYER_NORM = _implementations(plain.layer_norm)
SWIGLU = _implementations(plain.swiglu)
ROTATE = _implementations(plain.rotate)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, backend: str | None = None
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, computed in float32 or better.

    Args:
        x: (..., C).
        weight: (C,).
        eps: added to the mean square.
        offset: 1 if weights are centered at zero.
        backend: chunked, reference or liger; None reads MEGAKERNEL_BACKEND from the environment, and by default takes
            liger on a GPU if it is installed and chunked elsewhere.

    Returns:
        (..., C) in the dtype of x.
    """
    return cast(Tensor, choose(RMS_NORM, backend)(x, weight, eps, offset))


def rms_norm_and_residual(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of x, and x itself for the residual path: backward adds its two gradients in the norm's own pass."""
    return cast("tuple[Tensor, Tensor]", choose(RMS_NORM_AND_RESIDUAL, backend)(x, weight, eps, offset))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of residual + x, and this sum; x and residual (..., C)."""
    return cast("tuple[Tensor, Tensor]", choose(ADD_RMS_NORM, backend)(x, residual, weight, eps, offset))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, backend: str | None = None) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias; arguments and result as in `rms_norm`, bias (C,)."""
    return cast(Tensor, choose(LAYER_NORM, backend)(x, weight, bias, eps))


def swiglu(x: Tensor, *, backend: str | None = None) -> Tensor:
    """silu(gate) * up for x (..., 2 F) = [gate, up]: (..., F) in the dtype of x."""
    return cast(Tensor, choose(SWIGLU, backend)(x))


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Rotary embedding: queries and keys with pairs (x_j, x_{j + d/2}) rotated by the angles of `cos` and `sin`.

    Args:
        q: (B, H, N, d), d even.
        k: (B, H_kv, N, d), at the same positions.
        cos: (B, N, d / 2), or (1, N, d / 2) if all sequences have the same positions; float32 or better, which is also
            the dtype of the rotation.
        sin: the same.
        backend: as in `rms_norm`.

    Returns:
        q and k, in their own dtype.
    """
    return cast("tuple[Tensor, Tensor]", choose(ROTATE, backend)(q, k, cos, sin))

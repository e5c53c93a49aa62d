"""What a transformer layer has beside attention: norms, the gate of its MLP, and the rotation of queries and keys.

Each is one pass over the tokens, made of several where torch runs it. On a GPU Liger-Kernel's fused kernels take their
place where the package is installed (extra `gpu`); nothing of it is written again here.
"""

from types import ModuleType
from typing import cast

from torch import Tensor

from megakernel.ops.dispatch import Implementation, Kernels, choose
from megakernel.ops.layers import plain


def load_liger() -> ModuleType:
    """Liger-Kernel's functions as implementations, imported when one is chosen."""
    from megakernel.ops.layers import liger

    return liger


def _implementations(formula: Implementation) -> dict[str, Implementation]:
    """Backend -> implementation; the formulas of `plain` are short enough to be the reference as well."""
    name = formula.__name__
    return {"chunked": formula, "reference": formula, "liger": Kernels(name, load_liger, name)}


RMS_NORM = _implementations(plain.rms_norm)
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
        offset: 1 where weights are centred at zero.
        backend: chunked, reference or liger; None takes the environment's MEGAKERNEL_BACKEND, else liger on a GPU
            where it is installed and chunked elsewhere.

    Returns:
        (..., C) in the dtype of x.
    """
    return cast(Tensor, choose(RMS_NORM, backend)(x, weight, eps, offset))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, backend: str | None = None) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias; arguments and result as of `rms_norm`, bias (C,)."""
    return cast(Tensor, choose(LAYER_NORM, backend)(x, weight, bias, eps))


def swiglu(x: Tensor, *, backend: str | None = None) -> Tensor:
    """silu(gate) * up of x (..., 2 F), the gate in its first F columns: (..., F) in the dtype of x."""
    return cast(Tensor, choose(SWIGLU, backend)(x))


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Queries and keys with their pairs (x_j, x_{j + d/2}) turned by angles of cosine `cos` and sine `sin`.

    Args:
        q: (B, H, N, d), d even.
        k: (B, H_kv, N, d), another number of heads at the same positions.
        cos: (B, N, d / 2), or (1, N, d / 2) where all sequences have the same positions; float32 or better, in which
            the pairs are turned.
        sin: the same.
        backend: as of `rms_norm`.

    Returns:
        q and k, in their own dtype.
    """
    return cast("tuple[Tensor, Tensor]", choose(ROTATE, backend)(q, k, cos, sin))

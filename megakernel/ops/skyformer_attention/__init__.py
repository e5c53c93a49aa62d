"""Skyformer: kernelized attention through landmarks drawn from queries and keys (docs/formulas.md, 5)."""

from collections.abc import Callable

from torch import Tensor

from megakernel.ops.arguments import check_heads
from megakernel.ops.dispatch import choose
from megakernel.ops.pseudo_inverse import regularized_inverse
from megakernel.ops.skyformer_attention import chunked, reference

IMPLEMENTATIONS = {"chunked": chunked.attend, "reference": reference.attend}
"""Backend -> implementation."""


def skyformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    landmarks: Tensor,
    invert: Callable[[Tensor], Tensor] = regularized_inverse,
    key_mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """kappa(Q, L) M^+ kappa(L, K) V with kappa(x, y) = exp(-|x - y|^2 / 2 sqrt(d)) and M = kappa(L, L) (eqs. 5, 6).

    Linear in the number of tokens; not normalized and not causal.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv.
        v: (B, H_kv, N, D).
        landmarks: int64 rows of [Q; K], 0 .. 2N - 1, broadcastable to (B, H, F).
        invert: M (B, H, F, F) -> its inverse.
        key_mask: (B, N) bool, False removes a key; landmarks must be rows of real tokens.
        backend: reference or chunked.

    Returns:
        (B, H, N, D) in the dtype of v.

    Raises:
        ValueError: shapes or dtypes that do not fit, naming the argument.
    """
    check_heads(q, k, v)
    expected = (*q.shape[:2], landmarks.shape[-1])
    try:
        rows = landmarks.expand(expected)
    except RuntimeError:
        raise ValueError(
            f"landmarks has shape {tuple(landmarks.shape)}; expected to broadcast to {expected}"
        ) from None
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    attend = choose(IMPLEMENTATIONS, backend)
    return attend(q, k, v, landmarks=rows, invert=invert, key_mask=key_mask)

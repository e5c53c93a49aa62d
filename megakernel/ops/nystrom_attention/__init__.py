"""Nyströmformer: softmax attention through means over segments of queries and keys (docs/formulas.md, 5)."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.arguments import check_heads
from megakernel.ops.dispatch import choose
from megakernel.ops.nystrom_attention import chunked, reference
from megakernel.ops.pseudo_inverse import softmax_inverse

IMPLEMENTATIONS = {"chunked": chunked.attend, "reference": reference.attend}
"""Backend -> implementation."""


def nystrom_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segments: Tensor,
    count: int,
    invert: Callable[[Tensor], Tensor] = softmax_inverse,
    key_mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """s(Q L_K^T) s(L_Q L_K^T)^+ s(L_Q K^T) V with s the softmax of scores over sqrt(d), L the means of segments.

    Linear in the number of tokens; not causal.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv.
        v: (B, H_kv, N, D).
        segments: int64 (B, N) or (1, N), the segment 0 .. count - 1 of each token. A segment without real tokens has no
            landmark.
        count: segments.
        invert: the softmax matrix between landmarks (B, H, count, count) -> its inverse.
        key_mask: (B, N) bool, False removes a token from means and keys.
        backend: reference or chunked.

    Returns:
        (B, H, N, D) in the dtype of v; 0 in rows without a real token.

    Raises:
        ValueError: shapes or dtypes that do not fit, naming the argument.
    """
    check_heads(q, k, v)
    return choose(IMPLEMENTATIONS, backend)(
        q, k, v, segments=segments, count=count, invert=invert, key_mask=key_mask
    )


def depthwise_convolution(v: Tensor, kernel: Tensor) -> Tensor:
    """Each head's values under its own filter along the sequence, zeros beyond the ends.

    v: (B, H, N, D); kernel: (H, W), W odd; the same for all channels of a head.
    """
    heads, width = kernel.shape
    weight = kernel.to(v.dtype)[:, None, :, None]
    return F.conv2d(v, weight, padding=(width // 2, 0), groups=heads)

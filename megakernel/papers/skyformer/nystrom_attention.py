"""Nyströmformer: softmax attention through means of segments of queries and keys (docs/formulas.md, 5)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.arguments import check_heads
from megakernel.ops.dispatch import choose
from megakernel.ops.tensors import accum_dtype
from megakernel.papers.skyformer.pseudo_inverse import softmax_inverse


def nystrom_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segments: Tensor,
    count: int,
    key_mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """s(Q L_K^T) s(L_Q L_K^T)^+ s(L_Q K^T) V; s: softmax of scores / sqrt(d), L: means of segments.

    Linear in the number of tokens; not causal.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv.
        v: (B, H_kv, N, D).
        segments: int64 (B, N) or (1, N), the segment 0 .. count - 1 of each token. A segment without real tokens has no
            landmark.
        count: number of segments.
        key_mask: (B, N) bool, False removes a token from means and keys.
        backend: reference or chunked.

    Returns:
        (B, H, N, D) in the dtype of v; 0 in sequences without real tokens.

    Raises:
        ValueError: invalid shapes or dtypes; the message names the argument.
    """
    check_heads(q, k, v)
    real = torch.ones_like(segments, dtype=torch.bool) if key_mask is None else key_mask
    return choose(IMPLEMENTATIONS, backend)(q, k, v, segments, real, count)


def depthwise_convolution(v: Tensor, kernel: Tensor) -> Tensor:
    """Convolution of v (B, H, N, D) along the sequence with one filter per head, zero-padded.

    kernel: (H, W), W odd; shared by all channels of a head.
    """
    heads, width = kernel.shape
    weight = kernel.to(v.dtype)[:, None, :, None]
    return F.conv2d(v, weight, padding=(width // 2, 0), groups=heads)


def chunked(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, real: Tensor, count: int) -> Tensor:
    """Linear time: segment means by one matrix product, and no scores between tokens."""
    group = q.shape[1] // k.shape[1]
    out_dtype, dtype = v.dtype, accum_dtype(q.dtype)
    q = q.to(dtype) * q.shape[-1] ** -0.5
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    # (B, 1, count, N): whether the token belongs to the segment.
    members = ((segments[:, None] == torch.arange(count, device=q.device)[:, None]) & real[:, None])[:, None]
    sizes = members.sum(-1, keepdim=True)
    means = members.to(dtype) / sizes.clamp(min=1)
    mean_q, mean_k = means @ q, means @ k
    exists = (sizes > 0)[..., 0]

    to_landmarks = _softmax(q, mean_k, exists)
    between = _softmax(mean_q, mean_k, exists)
    # Missing landmarks get an identity block, which stays invertible and separate from the others.
    missing = torch.diag_embed((~exists).to(dtype))
    between = between * exists[..., None] + missing
    from_keys = _softmax(mean_q, k, real[:, None]) * exists[..., None]
    return (to_landmarks @ (softmax_inverse(between) @ (from_keys @ v))).to(out_dtype)


def _softmax(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """Softmax of q.k over visible (B, 1, m) keys; rows without any are 0."""
    scores = (q @ k.transpose(-1, -2)).masked_fill(~visible[..., None, :], torch.finfo(q.dtype).min)
    return scores.softmax(-1).masked_fill(~visible[..., None, :], 0.0)


def reference(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, real: Tensor, count: int) -> Tensor:
    """From the formula, with an N x N matrix of weights per sequence and head."""
    batch, heads, length, _ = q.shape
    group = heads // k.shape[1]
    out = v.new_zeros(batch, heads, length, v.shape[-1])
    q, k, v = (x.to(accum_dtype(x.dtype)) for x in (q, k, v))
    for b, mask in enumerate(real.expand(batch, -1)):
        real_segments = segments.expand(batch, -1)[b, mask]
        for head in range(heads if len(real_segments) else 0):
            queries, keys, values = (
                x[b, index, mask] for x, index in ((q, head), (k, head // group), (v, head // group))
            )
            weights = _weights(queries, keys, real_segments, count)
            out[b, head, mask] = (weights @ values).to(out.dtype)
    return out


def _weights(q: Tensor, k: Tensor, segments: Tensor, count: int) -> Tensor:
    """Weights (n, n) of one sequence and head with n real tokens; q, k (n, d)."""

    def softmax(q: Tensor, k: Tensor) -> Tensor:
        # Not a plain quotient of exponentials, which would overflow for large queries.
        return torch.softmax(q @ k.T * q.shape[-1] ** -0.5, -1)

    used = segments.unique().tolist()
    mean_q, mean_k = (torch.stack([x[segments == s].mean(0) for s in used]) for x in (q, k))
    # Missing landmarks get an identity block.
    between = torch.eye(count, dtype=q.dtype, device=q.device)
    places = torch.meshgrid(*[torch.tensor(used, device=q.device)] * 2, indexing="ij")
    inverse = softmax_inverse(between.index_put(places, softmax(mean_q, mean_k)))[places]
    return softmax(q, mean_k) @ inverse @ softmax(mean_q, k)


IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}
"""Backend -> implementation."""

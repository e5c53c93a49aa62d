"""All keys of a shard at once by PyTorch's fused kernels, which also give each query's log of summed weights.

The functions behind `scaled_dot_product_attention` are called by name, because it keeps that logarithm to itself. They
share key heads between query heads without repeating them, and read a normalizer that is that of more keys than
they are given.
"""

import torch
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype

aten = torch.ops.aten


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether there is a kernel for q (B, H, N, d), k (B, H_kv, M, d) and v (B, H_kv, M, D)."""
    width = q.shape[-1]
    if v.shape[-1] != width or any(x.stride(-1) != 1 for x in (q, k, v)):
        return False
    if q.device.type == "cpu":
        return True
    # GPUs too old for these kernels are too old for bfloat16.
    return q.is_cuda and q.dtype == torch.bfloat16 and width % 8 == 0 and width <= 256


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Weighted means of the values (B, H, N, d), and logs of the sums of weights (B, H, N) in float32 or better.

    causal: a query sees the keys up to its own place.
    """
    if q.is_cuda:
        out, log_sums, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, log_sums
    # CPUs have no faster arithmetic for halves, and float32 spares a rounding for each shard.
    q, k, v = (x.to(accum_dtype(x.dtype)) for x in (q, k, v))
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v that come of these pairs.

    out: (B, H, N, d) and log_sums: (B, H, N), those over all keys that the queries saw, here and elsewhere; grad: that
    of `out`.
    """
    if q.is_cuda:
        # Nothing is dropped out: the state of a random generator is not read. The logs are read without their strides.
        state, offset = (torch.empty(n, dtype=torch.uint64, device=q.device) for n in (2, ()))
        return aten._scaled_dot_product_flash_attention_backward(
            grad.to(q.dtype), q, k, v, out.to(q.dtype), log_sums.contiguous(),
            None, None, q.shape[2], k.shape[2], 0.0, causal, state, offset,
        )  # fmt: skip
    tensors = (x.to(accum_dtype(x.dtype)) for x in (grad, q, k, v, out))
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, log_sums, 0.0, causal)

"""Attention to one shard's keys by PyTorch's fused kernels, which also return the log-sum-exp of each query.

These call the functions behind `scaled_dot_product_attention`, which does not return the log-sum-exp. The functions
support grouped-query attention without repeating key heads, and their backward accepts a log-sum-exp over more keys
than they are given.
"""

import torch
from torch import Tensor

from megakernel.ops.tensors import accum_dtype

aten = torch.ops.aten


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a kernel supports q (B, H, N, d), k (B, H_kv, M, d) and v (B, H_kv, M, D)."""
    width = q.shape[-1]
    if v.shape[-1] != width or any(x.stride(-1) != 1 for x in (q, k, v)):
        return False
    if q.device.type == "cpu":
        return True
    # GPUs too old for these kernels are too old for bfloat16.
    return q.is_cuda and q.dtype == torch.bfloat16 and width % 8 == 0 and width <= 256


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention outputs (B, H, N, d), and their log-sum-exp (B, H, N) in float32 or better.

    causal: a query sees the keys up to its own index.
    """
    if q.is_cuda:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    # Half precision is not faster on CPUs, and float32 saves a rounding per shard.
    q, k, v = (x.to(accum_dtype(x.dtype)) for x in (q, k, v))
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum_exp: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Contributions of these queries and keys to the gradients of q, k and v.

    out: (B, H, N, d) and log_sum_exp: (B, H, N), over all keys of the queries, also other shards'; grad: of `out`.
    """
    if q.is_cuda:
        # The RNG state is not read, because dropout is 0. The kernel ignores the strides of log_sum_exp.
        state, offset = (torch.empty(n, dtype=torch.uint64, device=q.device) for n in (2, ()))
        return aten._scaled_dot_product_flash_attention_backward(
            grad.to(q.dtype), q, k, v, out.to(q.dtype), log_sum_exp.contiguous(),
            None, None, q.shape[2], k.shape[2], 0.0, causal, state, offset,
        )  # fmt: skip
    tensors = (x.to(accum_dtype(x.dtype)) for x in (grad, q, k, v, out))
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, log_sum_exp, 0.0, causal)

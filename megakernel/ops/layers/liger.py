"""The ops of `megakernel.ops.layers`, and the cross entropy of the head, by Liger-Kernel; all sums are float32.

The package is optional, and imported when a kernel first runs.
"""

import importlib.util
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

WIDEST = 65_536
"""The widest rows that Liger-Kernel's programs can hold."""


def unsupported(x: Tensor, *others: Any, **options: Any) -> str | None:
    """Why Liger-Kernel cannot take a call with x as its first argument, or None."""
    if not _is_installed():
        return "liger-kernel is not installed: pip install -e '.[gpu]'"
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"tokens are {x.dtype}; expected bfloat16, float16 or float32"
    if x.shape[-1] > WIDEST:
        return f"tokens have width {x.shape[-1]}; expected at most {WIDEST}"
    return None


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """See `megakernel.ops.layers.rms_norm`."""
    from liger_kernel.ops import LigerRMSNormFunction

    # `gemma` computes in float32 and rounds once, as torch does; `llama` also rounds before the weight. Not in place:
    # the incoming gradient may be shared.
    return LigerRMSNormFunction.apply(x, weight, eps, offset, "gemma", False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `megakernel.ops.layers.layer_norm`."""
    from liger_kernel.ops import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, eps)


def swiglu(x: Tensor) -> Tensor:
    """See `megakernel.ops.layers.swiglu`."""
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    # In Liger-Kernel 0.8.5 the gradient always has two dimensions.
    return LigerFusedGateUpSiLUMulFunction.apply(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `megakernel.ops.layers.rotate`."""
    return _Rotation.apply(q, k, cos, sin)


class _Rotation(torch.autograd.Function):
    """LigerRopeFunction on copies, because it overwrites inputs and gradients that are already in its layout."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from liger_kernel.ops import rope_forward

        ctx.save_for_backward(cos, sin)
        q, k, _, _ = rope_forward(_tokens_first(q), _tokens_first(k), cos, sin, rotary_dim=q.shape[-1])
        return q, k

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from liger_kernel.ops import rope_backward

        dq, dk = rope_backward(*map(_tokens_first, grads), *ctx.saved_tensors, rotary_dim=grads[0].shape[-1])
        return dq, dk, None, None


def _tokens_first(x: Tensor) -> Tensor:
    """A copy of x (B, H, N, d) with the memory layout (B, N, H, d)."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def summed_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, vocab_size: int, *, ignored: int = -100
) -> Tensor:
    """The summed cross entropy in nats of logits hidden W^T, float32 ().

    Forward also computes the gradients, chunk by chunk, so logits are computed once and never exist whole.

    Args:
        hidden: (T, C).
        weight: W (R, C), the whole padded vocabulary.
        targets: (T,) int64.
        rows: tokens whose logits may be in memory at once.
        vocab_size: the unpadded vocabulary; later rows of W are excluded from the softmax.
        ignored: the target that does not count.
    """
    if not len(hidden):
        return (hidden @ weight.T).float().sum()
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    # Slicing W would do too, but GPUs are slow with products of odd sizes. The bias costs two more passes over the
    # logits; neither has been measured.
    padding = None
    if vocab_size < len(weight):
        padding = hidden.new_zeros(len(weight))
        padding[vocab_size:] = -math.inf
    return _SummedCrossEntropy.apply(hidden, weight, targets, rows, padding, ignored, needs_grad)


class _SummedCrossEntropy(torch.autograd.Function):
    """Liger-Kernel's fused linear cross entropy on slices of tokens, so that its chunks are as large as allowed.

    Liger derives its chunk size from the memory of `hidden` alone: that is 64 tokens for 768 columns and a vocabulary
    of 50,000, too few to fill a GPU, and for a million tokens far more than asked for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: int,
        padding: Tensor | None,
        ignored: int,
        needs_grad: bool,
    ) -> Tensor:
        from liger_kernel.ops import fused_linear_cross_entropy_forward

        chunk = 1 << (rows.bit_length() - 1)  # chunks are powers of two
        size = chunk * -(-len(weight) // hidden.shape[1])
        losses, dhidden_parts, dweight = [], [], None
        for part, part_targets in zip(hidden.split(size), targets.split(size)):
            loss, _, _, _, dpart, dweight_part, _ = fused_linear_cross_entropy_forward(
                part,
                weight,
                part_targets,
                bias=padding,
                ignore_index=ignored,
                reduction="sum",
                accum_dtype=torch.float32,
                compute_gradients=needs_grad,
                weight_requires_grad=ctx.needs_input_grad[1],
                chunk_mem_const=_chunk_mem_const(len(part), chunk, *weight.shape),
            )
            losses.append(loss)
            dhidden_parts.append(dpart)
            if dweight_part is not None:
                dweight = dweight_part.float() if dweight is None else dweight.add_(dweight_part)
        if needs_grad:
            dhidden = dhidden_parts[0] if len(dhidden_parts) == 1 else torch.cat(dhidden_parts)
            ctx.save_for_backward(dhidden, None if dweight is None else dweight.to(weight.dtype))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        scale = grads[0]
        return dhidden * scale, None if dweight is None else dweight * scale, *[None] * 5


def _chunk_mem_const(tokens: int, chunk: int, rows: int, width: int) -> int:
    """The largest `chunk_mem_const` for which Liger-Kernel splits `tokens` tokens into chunks of at most `chunk`.

    Liger splits T tokens into about ceil(R / (chunk_mem_const * C)) chunks.
    """
    chunks = -(-tokens // chunk)
    return -(-rows // width) if chunks == 1 else (rows - 1) // (width * (chunks - 1))

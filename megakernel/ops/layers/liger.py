"""The ops of `megakernel.ops.layers`, and the cross entropy of the head, by Liger-Kernel; all sums are float32.

The package is optional, and imported when a kernel first runs.
"""

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megakernel.config.extras import install
from megakernel.ops.kernels.primitives import power_of_two

WIDEST = 65_536
"""The widest rows that Liger-Kernel's programs can hold."""

_STAGES = 2
"""Pipeline stages of LigerFusedAddRMSNormFunction's kernels."""

_NOT_INSTALLED = f"liger-kernel is not installed: {install('gpu')}"


def unsupported(x: Tensor, *others: Any, **options: Any) -> str | None:
    """Why Liger-Kernel cannot take a call with x as its first argument, or None."""
    if not _is_installed():
        return _NOT_INSTALLED
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


def rms_norm_and_residual(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See `megakernel.ops.layers.rms_norm_and_residual`."""
    return _NormAndResidual.apply(x, weight, eps, offset)


class _NormAndResidual(torch.autograd.Function):
    """LigerRMSNormFunction's forward, and LigerFusedAddRMSNormFunction's backward, which adds two gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        from liger_kernel.ops.rms_norm import rms_norm_forward

        normed, rows, *saved, block, warps, mode = rms_norm_forward(
            x.contiguous(), weight.contiguous(), eps, offset, "gemma", None
        )
        ctx.settings = (offset, mode, block, warps, _STAGES, False)
        ctx.save_for_backward(rows, weight, *saved)
        return normed, x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_backward

        both = (grad.contiguous() for grad in grads)
        dx, _, dweight = fused_add_rms_norm_backward(
            *both, *ctx.saved_tensors, *ctx.settings, needs_dw=ctx.needs_input_grad[1]
        )
        return dx, dweight, None, None


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See `megakernel.ops.layers.add_rms_norm`."""
    from liger_kernel.ops import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, "gemma", False)


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


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    needs_grad: bool,
    z_loss: float,
    *,
    ignored: int = -100,
) -> tuple[Tensor, Tensor]:
    """The sums of cross entropy and z-loss in nats, float32 (2,), of logits hidden W^T, and their gradient by these.

    Liger-Kernel's fused loss would take no more tokens at once than have logits of the size of `hidden` (a 64th for 768
    columns and a vocabulary of 50,000), would make the host wait for a number that no sum needs, and knows no padding.

    Args:
        hidden: (T, C).
        weight: W (R, C), the whole padded vocabulary.
        targets: (T,) int64.
        vocab_size: the unpadded vocabulary; later rows of W are no part of the softmax.
        needs_grad: whether the second result is the gradient (T, R) rather than the logits.
        z_loss: coefficient of logsumexp(logits)^2.
        ignored: the target that does not count.
    """
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

    logits = hidden @ weight.T
    losses, z_losses = hidden.new_zeros(2, len(hidden), dtype=torch.float32)
    unused: dict[str, Any] = dict.fromkeys(("weight_ptr", "token_accuracy_ptr", "softcap"))
    unused |= {"predicted_tokens_ptr": None, "token_accuracy_stride": 0, "predicted_tokens_stride": 0}
    unused |= {"weight_sum": 0.0, "label_smoothing": 0.0}
    flags = ("HAS_WEIGHT", "HAS_SOFTCAPPING", "RETURN_TOKEN_ACCURACY")
    unused |= dict.fromkeys((*flags, "RETURN_PREDICTED_TOKENS"), False)
    liger_cross_entropy_kernel[(len(logits),)](
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=targets,
        Y_stride=targets.stride(0),
        loss_ptr=losses,
        z_loss_ptr=z_losses,
        loss_stride=losses.stride(0),
        lse_square_scale=z_loss,
        RETURN_Z_LOSS=z_loss > 0,
        n_cols=vocab_size,
        n_non_ignore=1,  # this and the next only divide means
        sum_non_ignore_weight=1,
        ignore_index=ignored,
        reduction="sum",
        HAS_GRADIENTS=needs_grad,
        BLOCK_SIZE=min(MAX_FUSED_SIZE, power_of_two(vocab_size)),
        num_warps=32,
        **unused,
    )
    if needs_grad:
        logits[:, vocab_size:] = 0
    return torch.stack([(losses - z_losses).sum(), z_losses.sum()]), logits

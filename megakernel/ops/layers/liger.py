"""The same, and the loss behind them, by Liger-Kernel; every sum in float32.

The package is imported when a kernel first runs: neither a CPU nor a GPU needs it.
"""

import importlib.util
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

WIDEST = 65_536
"""Columns of a row that liger-kernel's programs hold at most."""


def unsupported(x: Tensor, *others: Any, **options: Any) -> str | None:
    """Why liger-kernel cannot take a call with x as its first argument."""
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

    # `gemma` computes all in float32 and rounds once, as torch does; `llama` rounds before the weight as well. Not in
    # place: the gradient that comes from behind may be another's too.
    return LigerRMSNormFunction.apply(x, weight, eps, offset, "gemma", False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `megakernel.ops.layers.layer_norm`."""
    from liger_kernel.ops import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, eps)


def swiglu(x: Tensor) -> Tensor:
    """See `megakernel.ops.layers.swiglu`."""
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    # Of 0.8.5 the gradient has two dimensions whatever x has.
    return LigerFusedGateUpSiLUMulFunction.apply(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `megakernel.ops.layers.rotate`."""
    return _Rotation.apply(q, k, cos, sin)


class _Rotation(torch.autograd.Function):
    """LigerRopeFunction on copies: it writes over what already lies in its layout, gradients included."""

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
    """A copy of x (B, H, N, d) that lies in memory as (B, N, H, d)."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def summed_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, vocab_size: int, *, ignored: int = -100
) -> Tensor:
    """The sum of the cross entropies of hidden W^T and the targets in nats, float32 ().

    Gradients are computed with the loss, chunk by chunk, so that logits are computed once and never exist whole.

    Args:
        hidden: (T, C).
        weight: W (R, C), the whole vocabulary and rows that pad it.
        targets: (T,) int64.
        rows: tokens whose logits may exist at once.
        vocab_size: the first rows of W, which stand for tokens; the others have no part in the sum.
        ignored: the target that does not count.
    """
    if not len(hidden):
        return (hidden @ weight.T).float().sum()
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    # Fewer rows would do as well, but a GPU is slow with products of an odd number of columns. The price of a bias are
    # two more passes over the logits; both are unmeasured.
    padding = None
    if vocab_size < len(weight):
        padding = hidden.new_zeros(len(weight))
        padding[vocab_size:] = -math.inf
    return _SummedCrossEntropy.apply(hidden, weight, targets, rows, padding, ignored, learns)


class _SummedCrossEntropy(torch.autograd.Function):
    """Liger's fused head on stretches of tokens, each so long that its chunks are as long as they may be.

    Its own choice of chunks follows the memory of `hidden` alone: 64 tokens of 768 columns and a vocabulary of
    50,000, which a GPU cannot be busy with, and of a sequence of a million tokens far more than asked for.
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
        learns: bool,
    ) -> Tensor:
        from liger_kernel.ops import fused_linear_cross_entropy_forward

        chunk = 1 << (rows.bit_length() - 1)  # chunks are powers of two
        shares = -(-len(weight) // hidden.shape[1])
        losses, slopes, total = [], [], None
        for part, wanted in zip(hidden.split(chunk * shares), targets.split(chunk * shares)):
            loss, _, _, _, slope, term, _ = fused_linear_cross_entropy_forward(
                part,
                weight,
                wanted,
                bias=padding,
                ignore_index=ignored,
                reduction="sum",
                accum_dtype=torch.float32,
                compute_gradients=learns,
                weight_requires_grad=ctx.needs_input_grad[1],
                chunk_mem_const=_budget(len(part), chunk, *weight.shape),
            )
            losses.append(loss)
            slopes.append(slope)
            if term is not None:
                total = term.float() if total is None else total.add_(term)
        if learns:
            of_hidden = slopes[0] if len(slopes) == 1 else torch.cat(slopes)
            ctx.save_for_backward(of_hidden, None if total is None else total.to(weight.dtype))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        scale = grads[0]
        return of_hidden * scale, None if of_weight is None else of_weight * scale, *[None] * 5


def _budget(tokens: int, chunk: int, rows: int, width: int) -> int:
    """The largest memory budget of liger's with which chunks of `tokens` tokens have at most `chunk`.

    Liger cuts T tokens into about ceil(R / (budget * C)) chunks.
    """
    chunks = -(-tokens // chunk)
    return -(-rows // width) if chunks == 1 else (rows - 1) // (width * (chunks - 1))

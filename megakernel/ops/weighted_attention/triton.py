"""Weighted attention on a GPU: shapes, sizes and gradients around the kernels in `kernels`."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor

from megakernel.ops.kernels.features import padded
from megakernel.ops.kernels.launch import launch, rows_together, strides
from megakernel.ops.softmax_attention.spans import Spans
from megakernel.ops.weighted_attention import kernels
from megakernel.ops.weighted_attention.form import Form, Join, Similarity

WIDEST = 256
"""The largest d and D: a program holds whole rows."""

MOST_KEYS = 4
"""The largest M: a program holds the gradients of all keys of its positions."""


class Tiles(NamedTuple):
    """The sizes of a launch."""

    queries: int
    """Of one block."""

    keys: int
    """Positions of one block."""

    def options(self) -> dict[str, int]:
        """As `launch` takes them."""
        # Two stages: the next block of keys is on its way while one is weighed.
        return {"BQ": self.queries, "BK": self.keys, "warps": 8, "stages": 2}


TILES = {
    1: (Tiles(128, 64), Tiles(128, 64), Tiles(32, 128)),
    2: (Tiles(64, 64), Tiles(64, 64), Tiles(64, 32)),
    4: (Tiles(64, 32), Tiles(64, 32), Tiles(64, 32)),
    8: (Tiles(32, 32), Tiles(32, 32), Tiles(32, 16)),
    16: (Tiles(32, 32), Tiles(16, 32), Tiles(32, 16)),
    32: (Tiles(16, 16), Tiles(16, 16), Tiles(16, 16)),
}
"""Sizes of `read`, `pull_queries` and `pull_keys`, by what a position weighs in registers (`_tiles`)."""


def unsupported(q: Tensor, k: Tensor, v: Tensor, *, form: Form, mass: Tensor, spans: Spans) -> str | None:
    """Why the kernels do not take these arguments, or None."""
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"q is {q.dtype}; expected float32, bfloat16 or float16"
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] > WIDEST:
            return f"{name} is {x.shape[-1]} wide; expected at most {WIDEST}"
    if k.shape[2] > MOST_KEYS:
        return f"k has {k.shape[2]} keys at a position; expected at most {MOST_KEYS}"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, *, form: Form, mass: Tensor, spans: Spans) -> Tensor:
    """Arguments and result of `streamed.attend`."""
    exists = mass > 0
    # log 0 would have no gradient: a key without mass is one that nobody sees.
    logs = torch.where(exists, mass.clamp(min=torch.finfo(mass.dtype).tiny), 1.0).log()
    first, last = (x.to(torch.int32) for x in spans)
    return _read(q, k, v, logs.masked_fill(~exists, -torch.inf), first, last, *form)[0]


@torch.library.custom_op("megakernel::weighted_attention", mutates_args=())
def _read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_mass: Tensor,
    first: Tensor,
    last: Tensor,
    similarity: str,
    variances: Sequence[float],
    join: str,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, N, D), and what each query adds to the logs of its weights (B, H, M, N) float32."""
    form = _form(similarity, variances, join, normalize)
    q, k, v = map(rows_together, (q, k, v))
    out, of_queries = _empty_outputs(q, k, v)
    tiles, _, _ = _tiles(k, v)
    blocks = triton.cdiv(q.shape[2], tiles.queries)
    launch(
        kernels.read,
        (blocks * q.shape[0] * q.shape[1],),
        *(q, k, v, _of_keys(form, k, log_mass), first, last, out, of_queries),
        *(*strides(q), *k.stride()[:4], *strides(v), _span_batch(first)),
        *(q.shape[2], v.shape[2], q.shape[1], blocks),
        NORMALIZE=normalize,
        **_options(form, q, k, v),
        **tiles.options(),
    )
    return out, of_queries


@torch.library.custom_op("megakernel::weighted_attention_backward", mutates_args=())
def _pull(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_mass: Tensor,
    first: Tensor,
    last: Tensor,
    out: Tensor,
    of_queries: Tensor,
    similarity: str,
    variances: Sequence[float],
    join: str,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and log_mass."""
    form = _form(similarity, variances, join, normalize)
    grad, q, k, v = map(rows_together, (grad, q, k, v))
    dq, dk, dv, dlog = _empty_like(q, k, v, log_mass)
    of_keys = _of_keys(form, k, log_mass)
    delta = q.new_empty(q.shape[:3], dtype=torch.float32)
    steps = (*strides(q), *k.stride()[:4], *strides(v), *strides(grad), _span_batch(first))
    options = _options(form, q, k, v) | {"FACTORS": _precisions(form, q.shape[-1])}

    _, tiles, key_tiles = _tiles(k, v)
    blocks = triton.cdiv(q.shape[2], tiles.queries)
    launch(
        kernels.pull_queries,
        (blocks * q.shape[0] * q.shape[1],),
        *(q, k, v, of_keys, first, last, out, of_queries, grad, dq, delta),
        *(*steps, q.shape[2], v.shape[2], q.shape[1], blocks),
        NORMALIZE=normalize,
        **options,
        **tiles.options(),
    )
    blocks = triton.cdiv(v.shape[2], key_tiles.keys)
    launch(
        kernels.pull_keys,
        (blocks * v.shape[0] * v.shape[1],),
        *(q, k, v, of_keys, *_seen_by(first, last, v.shape[2]), of_queries, grad, delta, dk, dv, dlog),
        *(*steps, q.shape[2], v.shape[2], v.shape[1], blocks),
        **options,
        **key_tiles.options(),
    )
    return dq, dk, dv, dlog


def _empty_outputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, heads, length, v.shape[-1])
    return out, q.new_empty(batch, heads, k.shape[2], length, dtype=torch.float32)


def _empty_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors)


@_read.register_fake
def _(q, k, v, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q, k, v)


@_pull.register_fake
def _(grad, q, k, v, log_mass, *_: Any) -> tuple[Tensor, ...]:
    return _empty_like(q, k, v, log_mass)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, similarity, variances, join, normalize = inputs
    ctx.form = (similarity, variances, join, normalize)
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 10
    gradients = _pull(grad, *ctx.saved_tensors, *ctx.form)
    return (*gradients, None, None, None, None, None, None)


_read.register_autograd(_backward, setup_context=_save)


def _form(similarity: str, variances: Sequence[float], join: str, normalize: bool) -> Form:
    return Form(cast(Similarity, similarity), tuple(variances), cast(Join, join), normalize)


def _precisions(form: Form, width: int) -> tuple[float, ...]:
    """p of each key: what -|q - k|^2 / 2, or q.k, is multiplied by."""
    return tuple(1 / (variance * math.sqrt(width)) for variance in form.variances)


def _in_bits(precisions: Sequence[float]) -> tuple[float, ...]:
    """In units of log 2."""
    return tuple(p / math.log(2) for p in precisions)


def _of_keys(form: Form, k: Tensor, log_mass: Tensor) -> Tensor:
    """What each key adds to the log2 of its weights, (B, H_kv, M, S) float32."""
    terms = log_mass / math.log(2)
    if form.similarity == "gaussian":
        precisions = terms.new_tensor(_in_bits(_precisions(form, k.shape[-1])))
        # A norm sums in float32 without a copy of the keys.
        squares = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).square()
        terms = terms - squares * precisions[:, None] / 2
    return terms


def _span_batch(first: Tensor) -> int:
    """Stride between rows of the batch; rows that are alike come as one."""
    return first.stride(0) if len(first) > 1 else 0


def _seen_by(first: Tensor, last: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Spans read backwards: the first and the last query that sees each of `count` keys, (B, S) int32.

    Documents are contiguous, so both ends of a span grow from query to query.
    """
    places = torch.arange(count, dtype=torch.int32, device=first.device).repeat(len(first), 1)
    begin = torch.searchsorted(last.contiguous(), places, out_int32=True)
    return begin, torch.searchsorted(first.contiguous(), places, right=True, out_int32=True) - 1


def _options(form: Form, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Compile-time arguments of all kernels."""
    return {
        "G": q.shape[1] // k.shape[1],
        "PRECISIONS": _in_bits(_precisions(form, q.shape[-1])),
        "GAUSSIAN": form.similarity == "gaussian",
        "HARD": form.join == "max",
        "D": q.shape[-1],
        "DP": padded(q.shape[-1]),
        "V": v.shape[-1],
        "VP": padded(v.shape[-1]),
    }


def _tiles(k: Tensor, v: Tensor) -> tuple[Tiles, Tiles, Tiles]:
    """The largest tiles that stay in registers: M rows of 64 numbers of 16 bits weigh M.

    Numbers of 32 bits weigh eight times as much: their products are sums of three, of factors split in two.
    """
    width = max(padded(k.shape[-1]), padded(v.shape[-1]))
    weight = k.shape[2] * width // 64 * (8 if k.element_size() == 4 else 1)
    return next((tiles for most, tiles in TILES.items() if weight <= most), TILES[32])

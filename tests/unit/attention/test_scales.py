"""Outputs and gradients of every preset against float64, for queries and keys of every scale.

MEGAKERNEL_TEST_GRID=full runs the whole grid (an hour), and not the part of it that tells most.
"""

import copy
import itertools
import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megakernel.attention import AttentionLayer, build
from megakernel.config.attention import PRESETS, Attention, expand_preset
from megakernel.ops.projections import dense

HEADS = 2


class Point(NamedTuple):
    """What a layer is given."""

    width: int
    scale: float
    length: int
    dtype: torch.dtype


TELLING = [
    Point(128, 5.0, 16, torch.float32),
    Point(64, 5.0, 256, torch.float32),
    Point(64, 50.0, 64, torch.float32),
    Point(128, 20.0, 64, torch.bfloat16),
    Point(64, 10.0, 256, torch.float16),
]
WHOLE = itertools.starmap(
    Point,
    itertools.product(
        (64, 128),
        (1.0, 2.0, 5.0, 10.0, 20.0, 50.0),
        (16, 64, 256, 1024),
        (torch.float32, torch.bfloat16, torch.float16),
    ),
)
GRID = list(WHOLE) if os.environ.get("MEGAKERNEL_TEST_GRID") == "full" else TELLING

FORMS = {name: Attention.model_validate(expand_preset(name)) for name in PRESETS}
CASES = [
    pytest.param(name, causal, id=f"{name}-{'causal' if causal else 'bidirectional'}")
    for name, form in FORMS.items()
    for causal, impossible in ((True, form.mixes_future_tokens), (False, form.looks_back_only))
    if not impossible
]


def layer(name: str, causal: bool, point: Point) -> AttentionLayer:
    """A layer of `name`; cosines, whose sums cancel, with the smoothing that keeps them away from 0."""
    tree = {"preset": name}
    if (phi := FORMS[name].feature_map) is not None and phi.may_divide_by_zero:
        tree["feature_map"] = {"smoothing": 1.0}
    module = build(
        tree,
        num_heads=HEADS,
        num_kv_heads=1,
        head_dim=point.width,
        causal=causal,
        max_positions=point.length,
        seed=(1, 2),
    )
    return module.eval().to(point.dtype)


def inputs(name: str, point: Point) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the gradient of the output, numbers that `dtype` holds."""
    form, draw = FORMS[name], torch.Generator().manual_seed(0)
    count = getattr(form.compression, "rank", 1) if form.compresses_input else point.length
    keys = (form.keys_per_head,) if form.keys_per_head > 1 else ()
    shapes = ((HEADS, point.length), (1, *keys, count), (1, count), (HEADS, point.length))
    scales = (point.scale, point.scale, 1.0, 1.0)
    q, k, v, grad = (
        (scale * torch.randn(1, *shape, point.width, generator=draw)).to(point.dtype)
        for scale, shape in zip(scales, shapes, strict=True)
    )
    return [q, k, v], grad


def run(module: AttentionLayer, qkv: list[Tensor], grad: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The output and all gradients."""
    q, k, v = (x.to(dtype).requires_grad_() for x in qkv)
    out = module(q, k, v)
    leaves = {"dq": q, "dk": k, "dv": v, **{f"d {name}": x for name, x in module.named_parameters()}}
    found = torch.autograd.grad(
        out, list(leaves.values()), grad.to(dtype), allow_unused=True, materialize_grads=True
    )
    return {"out": out.detach(), **dict(zip(leaves, found, strict=True))}


def bounds(
    module: AttentionLayer, qkv: list[Tensor], grad: Tensor, point: Point
) -> dict[str, Callable[[float], float]]:
    """How far outputs and gradients of a given size may be from float64, by the first word of their name.

    A weight is exp(e), and e a sum of products, |q - k|^2 / 2 sqrt(d), q.k / sqrt(d), omega.q / d^1/4 or W q, of which
    none exceeds E = (|q| + |k|)^2 / sqrt(d) + Omega (|q| + |k|), Omega the longest frequency. Each is off by the unit
    roundoff u times its size, so e is by a few u E, and a weight by that share of itself: outputs by delta = 4 u E of
    the largest value. A gradient is a sum of p (do.(v - o)) de/dx, of terms up to S = |do| 2 max|v| L, L the steepest
    slope of an exponent. The terms may cancel to nothing, as where one key has all the weight; their roundings, delta
    of each, do not.

    Up to scale 5, where delta is below 1e-3, the bound is 1e-3 of what is left after cancelling, or of S / 1000.
    """
    q, k, v = (x.double() for x in qkv)
    width = q.shape[-1]
    longest = (q.norm(dim=-1).max() + k.norm(dim=-1).max()).item()
    omega = 0.0
    if (projection := getattr(module, "projection", None)) is not None and projection() is not None:
        omega = dense(projection(), width).norm(dim=-1).max().item()
    delta = 2 * torch.finfo(torch.float32).eps * (longest**2 / width**0.5 + omega * longest)
    values, pull = v.norm(dim=-1).max().item(), grad.double().norm().item()
    terms = 2 * pull * values * (longest / width**0.5 + omega)
    largest = {
        "out": values * grad.shape[2] ** 0.5,
        "dq": terms,
        "dk": terms,
        "dv": pull,
        "d": terms * width**0.5,
    }
    if point.scale <= 5:
        return {key: lambda size, most=most: 1e-3 * max(size, 1e-3 * most) for key, most in largest.items()}
    return {key: lambda size, most=most: delta * most for key, most in largest.items()}


@pytest.mark.parametrize("point", GRID, ids=lambda p: f"{p.width}-{p.scale:g}-{p.length}-{str(p.dtype)[6:]}")
@pytest.mark.parametrize(("name", "causal"), CASES)
def test_gradients_are_finite_and_near_float64(name, causal, point):
    module = layer(name, causal, point)
    qkv, grad = inputs(name, point)
    exact = run(copy.deepcopy(module).double(), qkv, grad, torch.float64)
    found = run(module, qkv, grad, point.dtype)
    allowed = bounds(module, qkv, grad, point)
    wrong = {}
    for key, wanted in exact.items():
        error, size = (found[key].double() - wanted).norm().item(), wanted.norm().item()
        # What is less than the smallest normal number has no digits, and a half has no more than its own.
        limit = allowed[key.split()[0]](size) + torch.finfo(point.dtype).eps * size + 1e-30
        if not error <= limit:
            wrong[key] = f"{error:.1e} of {size:.1e}; expected at most {limit:.1e}"
    assert not wrong

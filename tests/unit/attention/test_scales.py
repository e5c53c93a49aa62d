"""Outputs and gradients of every preset against float64, for queries and keys of several scales.

MEGAKERNEL_TEST_GRID=full runs the whole grid (eight minutes) instead of its bound sensitive points.
"""

import copy
import itertools
import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megakernel.attention import AttentionLayer, build
from megakernel.config.attention import PRESETS, Attention, expand_preset
from megakernel.ops.projections import dense
from tests.unit.attention.mechanisms import may_divide_by_zero, with_further

HEADS = 2


class Point(NamedTuple):
    """Sizes, scale and dtype of a layer's inputs."""

    width: int
    scale: float
    length: int
    dtype: torch.dtype


SENSITIVE = [
    Point(128, 5.0, 16, torch.float32),
    Point(64, 5.0, 256, torch.float32),
    Point(64, 50.0, 64, torch.float32),
    Point(128, 20.0, 64, torch.bfloat16),
    Point(64, 10.0, 256, torch.float16),
]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCALES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
WHOLE = list(itertools.starmap(Point, itertools.product((64, 128), _SCALES, (16, 64, 256, 1024), _DTYPES)))
IS_FULL = os.environ.get("MEGAKERNEL_TEST_GRID") == "full"
GRID = WHOLE if IS_FULL else SENSITIVE

CONFIGS = {name: Attention.model_validate(expand_preset(name)) for name in PRESETS}
CASES = [
    pytest.param(name, causal, id=f"{name}-{'causal' if causal else 'bidirectional'}")
    for name, config in CONFIGS.items()
    for causal, impossible in ((True, config.mixes_future_tokens), (False, config.looks_back_only))
    if not impossible
]


def layer(name: str, causal: bool, point: Point, /, **feature_map: object) -> AttentionLayer:
    """A layer of preset `name`; sums of cosines, which may cancel, get a smoothing that keeps them away from 0."""
    if may_divide_by_zero(CONFIGS[name]):
        feature_map["smoothing"] = 1.0
    tree = {"preset": name, **({"feature_map": feature_map} if feature_map else {})}
    module = build(
        tree,
        num_heads=HEADS,
        num_kv_heads=1,
        head_dim=point.width,
        causal=causal,
        max_positions=point.length,
        seed=(1, 2),
        rotary=False,
    )
    return with_further(module).eval().to(point.dtype)


def inputs(name: str, point: Point) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the gradient of the output, rounded to the dtype of the point."""
    config, draw = CONFIGS[name], torch.Generator().manual_seed(0)
    count = getattr(config.compression, "rank", 1) if config.compresses_input else point.length
    keys = (config.keys_per_head,) if config.keys_per_head > 1 else ()
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


def conditioning(module: AttentionLayer, qkv: list[Tensor], grad: Tensor) -> tuple[float, dict[str, float]]:
    """Relative error of a weight from rounding its exponent, and the size of the terms that outputs and gradients sum.

    A weight is exp(e), and e a sum of products, |q - k|^2 / 2 sqrt(d), q.k / sqrt(d), omega.q / d^1/4 or W q, of which
    none exceeds E = (|q| + |k|)^2 / sqrt(d) + Omega (|q| + |k|), Omega the longest frequency. Each is off by float32's
    unit roundoff u times its size, so e is by a few u E, and a weight by delta = 4 u E of itself. An output is off by
    delta of the largest value. A gradient is a sum of p (do.(v - o)) de/dx, of terms up to |do| 2 max|v| L, L the
    steepest slope of an exponent. The terms may cancel to nothing, as where one key has all the weight; their
    roundings, delta of each, do not. The second result maps the first word of a name to the size of its terms.
    """
    q, k, v = (x.double() for x in qkv)
    width = q.shape[-1]
    longest = (q.norm(dim=-1).max() + k.norm(dim=-1).max()).item()
    omega = 0.0
    if (projection := getattr(module, "projection", None)) is not None and projection() is not None:
        omega = dense(projection(), width).norm(dim=-1).max().item()
    delta = 2 * torch.finfo(torch.float32).eps * (longest**2 / width**0.5 + omega * longest)
    values, grad_norm = v.norm(dim=-1).max().item(), grad.double().norm().item()
    terms = 2 * grad_norm * values * (longest / width**0.5 + omega)
    of_rows = values * grad.shape[2] ** 0.5
    return delta, {"out": of_rows, "dq": terms, "dk": terms, "dv": grad_norm, "d": terms * width**0.5}


def limit(point: Point, delta: float, terms: float, size: float, reads_output: bool) -> float:
    """Allowed error of a gradient of this size: 1e-3 of it up to scale 5, above that by its conditioning.

    If more than 999 of 1000 parts cancel, 1e-3 is relative to one thousandth of the terms. Half precision adds its own
    rounding; a fused softmax's backward `reads_output` in half precision, which rounds every term.
    """
    rounding = 1e-3 * max(size, 1e-3 * terms) if point.scale <= 5 else delta * terms
    halves = point.dtype != torch.float32 and reads_output
    # Below the smallest normal number there is no precision.
    return rounding + torch.finfo(point.dtype).eps * (max(size, terms) if halves else size) + 1e-30


@pytest.mark.parametrize("point", GRID, ids=lambda p: f"{p.width}-{p.scale:g}-{p.length}-{str(p.dtype)[6:]}")
@pytest.mark.parametrize(("name", "causal"), CASES)
def test_outputs_and_gradients_are_finite_and_close_to_float64(name, causal, point):
    module = layer(name, causal, point)
    qkv, grad = inputs(name, point)
    exact = run(copy.deepcopy(module).double(), qkv, grad, torch.float64)
    found = run(module, qkv, grad, point.dtype)
    delta, terms = conditioning(module, qkv, grad)
    errors = {}
    for key, wanted in exact.items():
        error, size = (found[key].double() - wanted).norm().item(), wanted.norm().item()
        bound = limit(point, delta, terms[key.split()[0]], size, CONFIGS[name].is_plain_softmax)
        if not error <= bound:
            errors[key] = f"{error:.1e} of {size:.1e}; expected at most {bound:.1e}"
    assert not errors


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_the_quadratic_reference_is_finite_and_exact_at_large_scales(name, causal, monkeypatch):
    point = Point(16, 50.0, 40, torch.float64)
    module = layer(name, causal, point)
    qkv, grad = inputs(name, point)
    found = run(module, qkv, grad, point.dtype)
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "reference")
    exact = run(module, qkv, grad, point.dtype)
    delta, terms = conditioning(module, qkv, grad)
    delta *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    for key, wanted in exact.items():
        assert wanted.isfinite().all(), key
        error, size = (found[key] - wanted).norm().item(), wanted.norm().item()
        assert error <= 1e-9 * size + delta * terms[key.split()[0]], key

"""Kernels against float64 for queries and keys of every scale, within the bounds that hold for every backend.

MEGAKERNEL_TEST_GRID=full runs the whole grid of the other backends, as far as kernels support it.
"""

import copy

import pytest
import torch

from tests.tiers import tiered
from tests.unit.attention.test_scales import (
    IS_FULL,
    WHOLE,
    Point,
    conditioning,
    inputs,
    layer,
    limit,
    run,
)

PRESETS = ("performer", "gmm_prf", "fastfood_prf", "hedgehog", "linear")
LANDMARKS = ("flurka", "flurka_kernel", "flurka favor", "flurka_kernel favor")
SCALES = (1.0, 5.0, 10.0, 30.0)
POINTS = [
    *(Point(64, scale, 64, dtype) for scale in SCALES for dtype in (torch.bfloat16, torch.float32)),
    *(Point(64, scale, 16, torch.bfloat16) for scale in (10.0, 30.0)),
    *(Point(64, scale, 256, torch.bfloat16) for scale in (5.0, 30.0)),
    *(Point(128, scale, 64, torch.bfloat16) for scale in (5.0, 30.0)),
    Point(64, 30.0, 16, torch.float32),
]
# Keys that have nearly all the weight of many queries, over several segments.
HEAVY = [
    *((name, *Point(64, 5.0, 512, torch.bfloat16)) for name in ("performer", "gmm_prf", "fastfood_prf")),
    ("gmm_prf", *Point(128, 5.0, 256, torch.bfloat16)),
]
if IS_FULL:
    POINTS, HEAVY = list(WHOLE), []


def is_taken(name: str, point: Point) -> bool:
    """Whether kernels support this dtype and width."""
    is_narrow = point.width == 64 and name in PRESETS
    return point.dtype == torch.bfloat16 or (point.dtype == torch.float32 and is_narrow)


CASES = [(name, *point) for name in (*PRESETS, *LANDMARKS) for point in POINTS if is_taken(name, point)]
CASES += HEAVY
FIRST = [Point(64, 10.0, 16, torch.bfloat16), Point(64, 30.0, 16, torch.float32)]


@pytest.mark.parametrize(
    ("name", *Point._fields),
    tiered(CASES, [case for case in CASES if case[1:] in FIRST]),
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_kernels_are_finite_and_near_float64(name, width, scale, length, dtype, monkeypatch, device):
    point = Point(width, scale, length, dtype)
    # Presets with more features than kernels support get the largest supported number.
    most = 64 if dtype == torch.float32 else 128
    draws = {"performer": most, "fastfood_prf": most, "gmm_prf": most // 2}  # for each of two Gaussians
    features = {"samples": draws[name]} if name in draws else {}
    name, *other = name.split()
    if other:
        features = {"name": other[0], "samples": most}
    module = layer(name, True, point, **features).to(device)
    qkv, grad = inputs(name, point)
    qkv, grad = [x.to(device) for x in qkv], grad.to(device)
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "chunked")
    exact = run(copy.deepcopy(module).double(), qkv, grad, torch.float64)
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "triton")
    found = run(module, qkv, grad, dtype)
    delta, terms = conditioning(module, qkv, grad)
    # The kernels compute a window's means from rounded outputs, as other fused softmaxes do.
    reads_output = name == "flurka" and not other
    wrong = {}
    for key, wanted in exact.items():
        error, size = (found[key].double() - wanted).norm().item(), wanted.norm().item()
        bound = limit(point, delta, terms[key.split()[0]], size, reads_output)
        if not error <= bound:
            wrong[key] = f"{error:.1e} of {size:.1e}; expected at most {bound:.1e}"
    assert not wrong
    assert (found["out"].any(-1) | ~exact["out"].any(-1)).all()

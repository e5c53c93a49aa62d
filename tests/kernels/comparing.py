"""Comparing a kernel with the float64 reference of its op: outputs and every gradient."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where kernels run: the GPU, or the interpreter of a machine without one."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest RMS ratio: factors of products keep 24, 8 or 11 bits, sums are float32."""


def rms_ratio(actual: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """|actual - expected| / |expected|, or / `least` where that is more; NaN counts as infinite."""
    actual, expected = actual.detach().double(), expected.detach().double()
    ratio = ((actual - expected).norm() / expected.norm().clamp(min=least)).item()
    return float("inf") if ratio != ratio else ratio


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers that `dtype` holds exactly."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).to(DEVICE, dtype)


def assert_agrees(
    run: Callable[[str, Mapping[str, Tensor]], Mapping[str, Tensor]],
    leaves: Mapping[str, Tensor],
    draw: torch.Generator,
    tolerance: float,
    wider: Mapping[str, float] | None = None,
) -> None:
    """`run("triton", leaves)` gives the outputs and the gradients of `run("reference", leaves in float64)`.

    The gradients are those of a random sum of all outputs, whose terms are of one size. wider: tolerances of single
    results, which need a reason where they are given.
    """
    found: dict[str, dict[str, Tensor]] = {}
    weights: dict[str, Tensor] = {}
    for backend in ("reference", "triton"):
        kept = {
            name: (x.double() if backend == "reference" else x).detach().requires_grad_()
            for name, x in leaves.items()
        }
        outputs = run(backend, kept)
        if not weights:
            weights = {
                name: torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.device)
                / x.detach().norm()
                for name, x in outputs.items()
            }
        # A pull has the dtype of what it pulls at; the reference gets the rounded one.
        total = sum(
            (x.double() * weights[name].to(leaves_dtype(leaves)).double()).sum()
            for name, x in outputs.items()
        )
        slopes = torch.autograd.grad(total, list(kept.values()), allow_unused=True, materialize_grads=True)
        found[backend] = {**outputs, **{f"gradient of {name}": x for name, x in zip(kept, slopes)}}
    exact = found["reference"]
    # One key has no gradient in a quotient: what is left of it is held to the size of the others.
    largest = max(x.detach().double().norm().item() for name, x in exact.items() if "gradient" in name)
    ratios = {
        name: rms_ratio(x, exact[name], largest if exact[name].norm() < 1e-9 * largest else 1e-30)
        for name, x in found["triton"].items()
    }
    wider = wider or {}
    wrong = {name: ratio for name, ratio in ratios.items() if not ratio <= wider.get(name, tolerance)}
    assert not wrong, f"RMS ratios {ratios}; expected at most {tolerance}, {wider}"


def leaves_dtype(leaves: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of the tokens."""
    return leaves["q"].dtype

"""Comparing a kernel with the float64 reference of its op: outputs and every gradient."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where kernels run: the GPU, or Triton's interpreter on a machine without one."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest RMS ratio: operands of matrix products keep 24, 8 or 11 bits, sums are float32."""

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def rms_ratio(actual: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """|actual - expected| / max(|expected|, least); NaN counts as infinite."""
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
    backend: str = "triton",
) -> None:
    """`run(backend, leaves)` gives the outputs and the gradients of `run("reference", leaves in float64)`.

    The gradients are those of a random weighted sum of all outputs, with terms of equal size. The gradient of a single
    number (a key weight, a mixture's prior) is a sum over all tokens of terms of both signs, which nearly cancels in
    some draws. Errors are therefore relative to the root mean square of gradients over several such sums, not to the
    gradient that is compared.
    """
    exact, sizes, pull = _reference(run, leaves, draw)
    kept = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    found = _with_gradients(run(backend, kept), pull, kept)
    # The gradient through a quotient is 0 for a single key: its rounding errors are compared to the largest gradient.
    largest = max(size for name, size in sizes.items() if "gradient" in name)
    ratios = {
        name: rms_ratio(x, exact[name], largest if sizes[name] < 1e-9 * largest else sizes[name])
        for name, x in found.items()
    }
    wrong = {name: ratio for name, ratio in ratios.items() if not ratio <= tolerance}
    assert not wrong, f"RMS ratios {ratios}; expected at most {tolerance}"


PULLS = 4
"""Random weighted sums of the outputs that determine the size of gradients."""


def _reference(
    run: Callable[[str, Mapping[str, Tensor]], Mapping[str, Tensor]],
    leaves: Mapping[str, Tensor],
    draw: torch.Generator,
) -> tuple[dict[str, Tensor], dict[str, float], dict[str, Tensor]]:
    """Outputs and gradients for one pull (weights of the outputs), the size of each over all pulls, and that pull."""
    kept = {name: x.double().detach().requires_grad_() for name, x in leaves.items()}
    outputs = run("reference", kept)
    # The dtype of most outputs. Pulls are rounded to it, for the reference too.
    dtype = leaves["q"].dtype
    pulls = [
        {
            name: (torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.device) / x.detach().norm())
            .to(dtype)
            .double()
            for name, x in outputs.items()
        }
        for _ in range(PULLS)
    ]
    exact = [_with_gradients(outputs, pull, kept) for pull in pulls]
    sizes = {
        name: (sum(each[name].detach().norm().item() ** 2 for each in exact) / PULLS) ** 0.5
        for name in exact[0]
    }

    largest = max(sizes.values())

    def least(number: int) -> float:
        named = exact[number].items()
        return min(
            x.detach().norm().item() / sizes[name] for name, x in named if sizes[name] > 1e-9 * largest
        )

    # Take the pull whose smallest gradient is largest: there, cancellation hides the least.
    best = max(range(PULLS), key=least)
    return exact[best], sizes, pulls[best]


def _with_gradients(
    outputs: Mapping[str, Tensor], pull: Mapping[str, Tensor], leaves: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The outputs, and the gradients of their sum weighted by the pull."""
    total = sum((x.double() * pull[name]).sum() for name, x in outputs.items())
    slopes = torch.autograd.grad(
        total, list(leaves.values()), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return {**outputs, **{f"gradient of {name}": slope for name, slope in zip(leaves, slopes)}}

"""Whether an implementation computes what it says, before its time is believed."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor

from megakernel.attention import ALL_HEADS, HeadShard
from megakernel.ops.dispatch import EVERYWHERE, VARIABLE

from .cases import Case
from .computation import Computation, computation, draw
from .implementations import Implementation

CHECKED = 4096
"""Tokens of a sequence that is compared with float64 whole."""

CHECKED_LAYER = 1024
"""Tokens of a sequence that is compared whole in a layer, whose heads may be thousands wide."""


@dataclass(frozen=True)
class Comparison:
    """The largest error of an implementation, as RMS ratio |found - exact| / |exact|."""

    error: float
    what: str
    """The tensor and place of that error."""

    tolerance: float

    @property
    def is_right(self) -> bool:
        """Whether the times can be believed."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        relation = "<=" if self.is_right else ">"
        return f"{self.what}: error {self.error:.1e} {relation} {self.tolerance:.0e}"


def tolerance(implementation: Implementation, case: Case, dtype: torch.dtype) -> float:
    """The largest error by rounding: the project's bounds for its ops, twice bfloat16's for layers."""
    if dtype == torch.float32:
        return 1e-5
    return 1e-2 if implementation.is_ours and not case.is_layer else 2e-2


def check(implementation: Implementation, case: Case, device: torch.device, dtype: torch.dtype) -> Comparison:
    """Compare output and gradients on short sequences with float64, and longer sequences in part.

    In part: of causal attention one head, computed in float64 as well, and of a layer everything against float32. What
    has quadratic cost is held on short sequences alone.
    """
    most = CHECKED_LAYER if case.is_layer else CHECKED
    short = replace(case, batch=1, tokens=min(case.tokens, most))
    errors = _errors(implementation, short, draw(short, device, dtype), torch.float64)
    worst, what = max(errors)
    if case != short and implementation.preset != "softmax":
        spot, name = max(_spot(implementation, case, draw(case, device, dtype)))
        if spot > worst:
            worst, what = spot, f"{name} at {case}"
    return Comparison(worst, what, tolerance(implementation, case, dtype))


def _errors(
    implementation: Implementation, case: Case, drawn: Sequence[Tensor], dtype: torch.dtype
) -> list[tuple[float, str]]:
    found = _tensors(computation(implementation, case, drawn))
    exact = _exact(implementation, case, drawn, dtype)
    # An implementation may lack the weights of ours: names pair what both have.
    return [(rms_ratio(found[name], exact[name]), name) for name in found]


def _spot(implementation: Implementation, case: Case, drawn: Sequence[Tensor]) -> list[tuple[float, str]]:
    if case.is_layer:
        return _errors(implementation, case, drawn, torch.float32)
    head = case.heads - 1
    whole = _tensors(computation(implementation, case, drawn))
    part = [x[-1:, head : head + 1] for x in drawn]
    shard = HeadShard(head, case.heads) if implementation.normalize else ALL_HEADS
    exact = _exact(implementation, case, part, torch.float64, shard)
    names = ("output", "dq", "dk", "dv")
    return [(rms_ratio(whole[name][-1:, head : head + 1], exact[name]), name) for name in names]


def _exact(
    implementation: Implementation,
    case: Case,
    drawn: Sequence[Tensor],
    dtype: torch.dtype,
    shard: HeadShard = ALL_HEADS,
) -> dict[str, Tensor]:
    """What it is held against, by the chunked ops, which the references of the ops hold in float64."""
    with patch.dict(os.environ, {VARIABLE: EVERYWHERE}):
        return _tensors(computation(implementation, case, drawn, shard, dtype))


def _tensors(one: Computation) -> dict[str, Tensor]:
    """The output and the gradients by name, with heads before tokens."""
    out, gradients = one.train()
    inputs = ("dq", "dk", "dv") if one.inputs == 3 else ("dx",)
    named = {"output": out} | dict(zip(inputs, gradients))
    if one.tokens_first:
        named = {name: x.transpose(1, 2) for name, x in named.items()}
    weights = gradients[one.inputs :]
    # What has no influence, such as the gate of a sequence of one block, has no gradient.
    return named | {f"d(weight {i})": x for i, x in enumerate(weights) if x is not None}


def rms_ratio(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact|; infinite where something is not finite."""
    found, exact = found.double(), exact.double()
    if not found.isfinite().all():
        return float("inf")
    size = exact.norm().item()
    gap = (found - exact).norm().item()
    return gap / size if size else gap

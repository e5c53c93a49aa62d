"""Check that an implementation is correct before its times count."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor

from megakernel.attention import ALL_HEADS, HeadShard
from megakernel.ops.dispatch import EVERYWHERE, VARIABLE

from .cases import Case
from .computation import Computation, computation, random_tensors
from .implementations import Implementation

CHECKED_TOKENS = 4096
"""Maximum tokens of a sequence that is compared with float64 as a whole."""

CHECKED_LAYER_TOKENS = 1024
"""The same for a layer, whose heads may be thousands wide."""


@dataclass(frozen=True)
class LargestError:
    """The largest error of an implementation, as RMS ratio |actual - exact| / |exact|."""

    error: float
    what: str
    """The tensor that has this error, and the case if it is not the short one."""

    tolerance: float

    @property
    def is_right(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        relation = "<=" if self.is_right else ">"
        return f"{self.what}: error {self.error:.1e} {relation} {self.tolerance:.0e}"


def tolerance(implementation: Implementation, case: Case, dtype: torch.dtype) -> float:
    """The largest allowed error: the project's bounds for its ops; in bfloat16 twice that for layers and for others."""
    if dtype == torch.float32:
        return 1e-5
    return 1e-2 if implementation.is_ours and not case.is_layer else 2e-2


def check(
    implementation: Implementation, case: Case, device: torch.device, dtype: torch.dtype
) -> LargestError:
    """Compare output and gradients with float64 on short sequences, and partly on longer ones.

    Partly: one head of causal attention with float64, and all of a layer with float32. Softmax, whose cost is
    quadratic, is compared only on short sequences.
    """
    limit = CHECKED_LAYER_TOKENS if case.is_layer else CHECKED_TOKENS
    short = replace(case, batch=1, tokens=min(case.tokens, limit))
    errors = _errors(implementation, short, random_tensors(short, device, dtype), torch.float64)
    worst, what = max(errors)
    if case != short and implementation.preset != "softmax":
        error, name = max(_partial(implementation, case, random_tensors(case, device, dtype)))
        if error > worst:
            worst, what = error, f"{name} at {case}"
    return LargestError(worst, what, tolerance(implementation, case, dtype))


def _errors(
    implementation: Implementation, case: Case, tensors: Sequence[Tensor], dtype: torch.dtype
) -> list[tuple[float, str]]:
    actual = _tensors(computation(implementation, case, tensors))
    expected = _expected(implementation, case, tensors, dtype)
    # Another implementation may lack the weights of ours: compare the tensors that both have.
    return [(rms_ratio(actual[name], expected[name]), name) for name in actual]


def _partial(
    implementation: Implementation, case: Case, tensors: Sequence[Tensor]
) -> list[tuple[float, str]]:
    if case.is_layer:
        return _errors(implementation, case, tensors, torch.float32)
    head = case.heads - 1
    whole = _tensors(computation(implementation, case, tensors))
    part = [x[-1:, head : head + 1] for x in tensors]
    shard = HeadShard(head, case.heads) if implementation.normalize else ALL_HEADS
    expected = _expected(implementation, case, part, torch.float64, shard)
    names = ("output", "dq", "dk", "dv")
    return [(rms_ratio(whole[name][-1:, head : head + 1], expected[name]), name) for name in names]


def _expected(
    implementation: Implementation,
    case: Case,
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    shard: HeadShard = ALL_HEADS,
) -> dict[str, Tensor]:
    """The expected tensors, by our chunked ops, which unit tests compare with the ops' references in float64."""
    with patch.dict(os.environ, {VARIABLE: EVERYWHERE}):
        return _tensors(computation(implementation, case, tensors, shard, dtype))


def _tensors(computed: Computation) -> dict[str, Tensor]:
    """The output and the gradients by name, as (B, H, N, d)."""
    out, gradients = computed.train()
    inputs = ("dq", "dk", "dv") if computed.inputs == 3 else ("dx",)
    tensors = {"output": out} | dict(zip(inputs, gradients))
    if computed.tokens_first:
        tensors = {name: x.transpose(1, 2) for name, x in tensors.items()}
    weights = gradients[computed.inputs :]
    # A weight without influence, such as the gate of a sequence of one block, has no gradient.
    return tensors | {f"d(weight {i})": x for i, x in enumerate(weights) if x is not None}


def rms_ratio(actual: Tensor, exact: Tensor) -> float:
    """|actual - exact| / |exact|; infinite if `actual` has a number that is not finite."""
    actual, exact = actual.double(), exact.double()
    if not actual.isfinite().all():
        return float("inf")
    size = exact.norm().item()
    gap = (actual - exact).norm().item()
    return gap / size if size else gap

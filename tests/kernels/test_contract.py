"""What kernels promise for every op: the causal cases of `tests/unit/ops/cases.py`, across edges of tiles and segments.

Gradients, dtypes and sizes are compared with float64 in each op's own test file.
"""

from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megakernel.ops.flurka_attention import triton
from megakernel.ops.kernel_attention import tiles
from tests.kernels.comparing import DEVICE, TOLERANCE, rms_ratio
from tests.kernels.completed_interpreter import complete_for_fla
from tests.tiers import tiered
from tests.unit.ops.cases import CASES, Leaves, make, of_sequence, part_of

LENGTH = 70
DOCUMENTS = (0, 23, 32, 40, LENGTH)
"""Starts of documents, inside tiles and at an edge, and the end. The last one must enter the last segment alone."""

PACKED = torch.cat([torch.arange(end - start) for start, end in pairwise(DOCUMENTS)])[None].to(DEVICE)

NAMES = [name for name, case in CASES.items() if "triton" in case.backends and case.causal]
FIRST = ["kernel favor", "flurka gated elu 1 none", "weighted hard", "gated_delta_rule", "short_convolution"]
every_case = pytest.mark.parametrize("name", tiered(NAMES, FIRST))

BY_FLA = "gated_delta_rule"
"""Flash-linear-attention's kernels, which on a GPU do not take float32."""


def dtype_of(name: str) -> torch.dtype:
    return torch.bfloat16 if name == BY_FLA and DEVICE == "cuda" else torch.float32


def tolerance_of(name: str) -> float:
    # In float32, sums of log decays over starts of documents cost digits.
    return 5 * TOLERANCE[torch.float32] if name == BY_FLA and DEVICE == "cpu" else TOLERANCE[dtype_of(name)]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """Segments of 32 tokens, or eight blocks of FLuRKA, so that the sequence has three."""
    monkeypatch.setattr(tiles, "segment_length", lambda phi, q, v, causal: 32)
    monkeypatch.setattr(triton, "segment_blocks", lambda *_: 8)


@pytest.fixture(autouse=True)
def interpreter(name, monkeypatch):
    if name == BY_FLA and DEVICE == "cpu":
        complete_for_fla(monkeypatch)


def leaves_of(name: str) -> Leaves:
    return of_sequence(make(name, LENGTH, dtype=dtype_of(name), device=DEVICE), 0)


@cache
def whole(name: str) -> list[Tensor]:
    """The output of the kernels for the packed sequence, and the outgoing state."""
    return outputs(name, leaves_of(name), PACKED)


@torch.no_grad()
def outputs(name: str, leaves: Leaves, positions, state=None, backend: str = "triton") -> list[Tensor]:
    out, left = CASES[name].call(leaves, positions, state, backend)
    return [out, *CASES[name].state(left)]


@every_case
def test_packed_documents_equal_the_reference_of_each_apart(name):
    leaves = leaves_of(name)
    exact = {key: x.double() if x.is_floating_point() else x for key, x in leaves.items()}
    for begin, end in pairwise(DOCUMENTS):
        expected = outputs(name, part_of(name, exact, slice(begin, end)), 0, backend="reference")[0]
        assert rms_ratio(whole(name)[0][..., begin:end, :], expected) <= tolerance_of(name)


@every_case
@torch.no_grad()
def test_a_sequence_may_be_split_anywhere(name):
    leaves, found, state = leaves_of(name), [], None
    for begin, end in pairwise((0, 1, 33, 34, 48, LENGTH)):
        part = part_of(name, leaves, slice(begin, end))
        out, state = CASES[name].call(part, PACKED[:, begin:end], state, "triton")
        found.append(out)
    for one, other in zip([torch.cat(found, -2), *CASES[name].state(state)], whole(name), strict=True):
        assert rms_ratio(one, other) <= tolerance_of(name)


@every_case
def test_later_tokens_leave_earlier_outputs_bit_identical(name):
    leaves = leaves_of(name)
    cut = 33  # inside a tile, and behind an edge of segments
    changed = {key: x.clone() for key, x in leaves.items()}
    for key, later in part_of(name, changed, slice(cut, None)).items():
        if key in ("q", "k", "v"):
            later *= -3
    assert torch.equal(outputs(name, changed, PACKED)[0][..., :cut, :], whole(name)[0][..., :cut, :])


@pytest.mark.gpu  # the interpreter runs one program after another
@every_case
def test_two_runs_are_bit_identical(name):
    def run() -> list[Tensor]:
        leaves = {key: x.requires_grad_(x.is_floating_point()) for key, x in leaves_of(name).items()}
        out, _ = CASES[name].call(leaves, PACKED, None, "triton")
        learned = [x for x in leaves.values() if x.requires_grad]
        return [out, *torch.autograd.grad(out.square().sum(), learned)]

    assert all(torch.equal(one, other) for one, other in zip(run(), run(), strict=True))

"""flash-linear-attention, as called by `python -m benchmarks.kernels.attention`, computes the same as our ops."""

import pytest
import torch

from benchmarks.kernels.attention.cases import Case
from benchmarks.kernels.attention.check import check
from benchmarks.kernels.attention.implementations import IMPLEMENTATIONS

from .comparing import DEVICE
from .completed_interpreter import complete_for_fla

NAMES = [name for name, implementation in IMPLEMENTATIONS.items() if implementation.needs_fla]


@pytest.fixture
def interpreter(monkeypatch):
    if DEVICE == "cpu":
        complete_for_fla(monkeypatch)


@pytest.mark.second
@pytest.mark.parametrize("case", [Case(2, 130, heads=2, head_dim=16), Case(1, 64, heads=1, head_dim=32)])
@pytest.mark.parametrize("name", NAMES)
def test_flash_linear_attention_agrees_with_float64(name, case, interpreter):
    """Output and gradients, normalized and not."""
    # On a GPU, fla's float32 matrix products use TF32, which has 11 bits.
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    comparison = check(IMPLEMENTATIONS[name], case, torch.device(DEVICE), dtype)
    assert comparison.is_right, str(comparison)


def test_all_of_its_implementations_are_available():
    assert len(NAMES) == 4

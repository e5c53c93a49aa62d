"""flash-linear-attention, as called by `python -m benchmarks.kernels.attention`, computes the same as our ops."""

import builtins

import pytest
import torch
from triton.runtime import autotuner

from benchmarks.kernels.attention.cases import Case
from benchmarks.kernels.attention.check import check
from benchmarks.kernels.attention.implementations import IMPLEMENTATIONS

from .comparing import DEVICE

NAMES = [name for name, implementation in IMPLEMENTATIONS.items() if implementation.needs_fla]


class Counter(int):
    """A loop counter with the method `to`, as in compiled code."""

    def to(self, dtype):
        return self


@pytest.fixture
def interpreter(monkeypatch):
    """Makes Triton's interpreter able to run fla: no autotuning, and loop counters have methods."""
    if DEVICE == "cuda":
        return
    run = autotuner.Autotuner.run

    def run_first(self, *args, **kwargs):
        monkeypatch.setattr(self, "configs", self.configs[:1])
        return run(self, *args, **kwargs)

    monkeypatch.setattr(autotuner.Autotuner, "run", run_first)
    counted = lambda *bounds: map(Counter, builtins.range(*map(int, bounds)))  # noqa: E731
    for name in ("chunk_h", "chunk_o", "chunk_delta_h", "fused_chunk"):
        monkeypatch.setattr(f"fla.ops.common.{name}.range", counted, raising=False)
    monkeypatch.setattr("fla.ops.utils.cumsum.range", counted, raising=False)


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
    assert len(NAMES) == 5

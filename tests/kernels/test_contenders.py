"""What `megakernel bench attention` compares with computes the same: flash-linear-attention, as it is called there."""

import builtins

import pytest
import torch
from triton.runtime import autotuner

from megakernel.analysis.speed import others
from megakernel.analysis.speed.cases import Case
from megakernel.analysis.speed.check import check
from megakernel.analysis.speed.contenders import CONTENDERS

from .comparing import DEVICE

NAMES = [name for name, contender in CONTENDERS.items() if contender.needs_fla]


class Counter(int):
    """A loop's counter, which compiled code can convert."""

    def to(self, dtype):
        return self


@pytest.fixture
def interpreter(monkeypatch):
    """Triton's interpreter, able to run fla: there is nothing to tune, and counters of loops have methods."""
    if DEVICE == "cuda":
        return
    run = autotuner.Autotuner.run

    def run_first(self, *args, **kwargs):
        monkeypatch.setattr(self, "configs", self.configs[:1])
        return run(self, *args, **kwargs)

    monkeypatch.setattr(autotuner.Autotuner, "run", run_first)
    counted = lambda *bounds: map(Counter, builtins.range(*map(int, bounds)))  # noqa: E731
    for name in ("chunk_h", "chunk_o", "fused_chunk"):
        monkeypatch.setattr(f"fla.ops.common.{name}.range", counted, raising=False)
    monkeypatch.setattr("fla.ops.utils.cumsum.range", counted, raising=False)


@pytest.mark.parametrize("case", [Case(2, 130, heads=2, head_dim=16), Case(1, 64, heads=1, head_dim=32)])
@pytest.mark.parametrize("name", NAMES)
def test_flash_linear_attention_agrees_with_float64(name, case, interpreter):
    """Output and gradients, normalized and not."""
    # On a GPU fla's products of float32 are TF32's, of 11 bits.
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    verdict = check(CONTENDERS[name], case, torch.device(DEVICE), dtype)
    assert verdict.is_right, str(verdict)


def test_all_of_its_contenders_are_here():
    assert len(NAMES) == 4


def test_its_launches_and_torch_s_ops_count_what_they_read_and_write():
    case = Case(2, 1024, heads=4, head_dim=64)
    forward, both = (others.launched("fla chunk, not normalized", case, 2, back) for back in (False, True))
    vectors = [one.cost.bytes / (2 * 1024 * 4 * 64 * 2) for one in both]
    # elu and + 1 of q and of k; k, v and a state for every 64 tokens; q, k, v, these states and the output.
    assert vectors[: len(forward)] == [2, 2, 2, 2, 3, 5]
    # States in float32 now, of keys and of queries; q, k, v, do, both, dq and dk; the same for dv; and through elu.
    assert vectors[len(forward) :] == [4, 4, 10, 6, 3, 3]

"""FLuRKA fused and composed: what needs no GPU."""

import pytest

pytest.importorskip("triton")

from benchmarks.kernels import composed
from benchmarks.kernels.composed import FlurkaShape, counted
from megakernel.ops.dispatch import COMPOSED, KERNELS


def test_each_form_is_counted_with_its_own_kernels(monkeypatch):
    monkeypatch.setattr(composed, "COUNTED_TOKENS", 256)
    monkeypatch.setattr(composed, "HEADS", 2)
    names = {
        which: {x.name for x in counted(FlurkaShape(64, kv_heads=1), which)} for which in (KERNELS, COMPOSED)
    }
    own = {"merge_outputs", "merge_outputs_backward", "pool_gradients"}
    assert own <= names[COMPOSED]
    assert not own & names[KERNELS]
    assert {"merge", "merge_backward", "window_backward"} <= names[KERNELS] - names[COMPOSED]

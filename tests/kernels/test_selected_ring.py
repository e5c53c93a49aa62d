"""Shards in a ring give the results of the whole sequence with the kernels, too."""

import threading

import pytest
import torch

from megakernel.ops.selected_attention import choice_kernel
from megakernel.ops.selected_attention import triton as selected_triton
from megakernel.ops.weighted_attention import triton as window_triton
from tests.tiers import tiered
from tests.unit.ops.test_selected_ring import PACKED, in_one, in_ring, selector


@pytest.fixture
def one_launch_at_a_time(monkeypatch):
    """The interpreter replaces functions of Triton while a kernel runs, and shards are threads here."""
    lock = threading.Lock()
    for module in (choice_kernel, selected_triton, window_triton):
        launch = module.launch

        def locked(*arguments, launch=launch, **options):
            with lock:
                launch(*arguments, **options)

        monkeypatch.setattr(module, "launch", locked)


@pytest.mark.usefixtures("one_launch_at_a_time")
@pytest.mark.parametrize("size", tiered([2, 4], [4]))
@pytest.mark.parametrize(("unit", "group"), [("token", 0), ("tile", 0), ("token", 2)])
def test_a_ring_reads_what_the_whole_sequence_reads(size, unit, group, monkeypatch):
    module = selector(unit, group, "position")
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "triton")
    found = in_ring(module, size, PACKED, torch.float32)
    for actual, wanted in zip(found, in_one(module, PACKED, torch.float32), strict=True):
        # Sums of float32 in another order.
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)

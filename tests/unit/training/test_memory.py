import mmap

import pytest
import torch

from megakernel.training import step_costs
from megakernel.training.step_costs import MemoryPeaks

MIB = 2**20


@pytest.fixture
def peaks() -> MemoryPeaks:
    if not step_costs._can_reset():
        pytest.skip("this system cannot reset the peak of a process")
    return MemoryPeaks(torch.device("cpu"))


def touch(size: int) -> None:
    """Have `size` bytes for a moment; from the system, as freed memory of other tests may be at hand elsewhere."""
    with mmap.mmap(-1, size) as memory:
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 1


def test_each_phase_reports_its_own_peak(peaks):
    with peaks.phase("forward"):
        touch(200 * MIB)
    with peaks.phase("backward"):
        pass
    scalars = peaks.scalars()
    freed = scalars["memory/forward_peak_gib"] - scalars["memory/backward_peak_gib"]
    # Resident memory counts whole pages, and other threads' pages come and go.
    assert freed == pytest.approx(200 / 1024, rel=0.2)
    assert scalars["memory/peak_gib"] == scalars["memory/forward_peak_gib"]


def test_the_highest_peak_is_kept_over_windows(peaks):
    with peaks.phase("forward"):
        touch(200 * MIB)
    first = peaks.scalars()["memory/peak_gib"]
    with peaks.phase("forward"):
        pass
    later = peaks.scalars()
    assert later["memory/peak_gib"] == first
    assert later["memory/forward_peak_gib"] < first - 0.1


def test_a_phase_reports_the_highest_peak_of_its_window(peaks):
    for size in (200 * MIB, 1):
        with peaks.phase("forward"):
            touch(size)
    scalars = peaks.scalars()
    assert scalars["memory/forward_peak_gib"] == scalars["memory/peak_gib"]


def test_without_resettable_peaks_only_the_peak_of_the_process_is_reported(monkeypatch):
    monkeypatch.setattr(step_costs, "_can_reset", lambda: False)
    peaks = MemoryPeaks(torch.device("cpu"))
    with peaks.phase("forward"):
        pass
    scalars = peaks.scalars()
    assert list(scalars) == ["memory/peak_gib"]
    assert scalars["memory/peak_gib"] > 0.01, "a process that has imported torch needs more than 10 MiB"

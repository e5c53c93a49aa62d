"""The most memory that each phase of a step takes."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"
"""What Linux takes as: the highest resident size is the present one."""


class MemoryPeaks:
    """Peaks of this process: allocated bytes of its CUDA device, or resident bytes on CPU.

    A system whose peak cannot be reset (no /proc) knows the peak of the whole life alone.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._phases: dict[str, int] = {}
        self._highest = 0
        self._resets = device.type == "cuda" or _can_reset()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a phase: `memory/NAME_peak_gib` is the most while it ran, in any step of the window."""
        self._reset()
        yield
        if self._resets:
            self._phases[name] = max(self._phases.get(name, 0), self._note())

    def scalars(self) -> dict[str, float]:
        """GiB under their TensorBoard tags: the most so far, and of each phase since the last call."""
        self._note()
        peaks = {f"memory/{name}_peak_gib": peak / 2**30 for name, peak in self._phases.items()}
        self._phases = {}
        return {"memory/peak_gib": self._highest / 2**30, **peaks}

    def _reset(self) -> None:
        self._note()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._resets:
            _CLEAR_REFS.write_text(_RESET_PEAK)

    def _note(self) -> int:
        """The peak since the last reset, counted into the highest."""
        peak = (
            torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else _resident_peak()
        )
        self._highest = max(self._highest, peak)
        return peak


def _can_reset() -> bool:
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return _STATUS.exists()


def _resident_peak() -> int:
    """Bytes."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024

"""Logged costs of a step on this rank: peak memory by phase, and bytes sent between context-parallel shards."""

import resource
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from megakernel.parallel.sequence import GroupShard

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"
"""Written to clear_refs, it resets the peak resident size to the present size."""


class MemoryPeaks:
    """Peak memory of this process: allocated bytes on its CUDA device, or resident bytes on CPU.

    Without /proc the peak cannot be reset, so only that of the whole process is known.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._phases: dict[str, int] = {}
        self._highest = 0
        self._resets = device.type == "cuda" or _can_reset()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Wraps a phase: `memory/NAME_peak_gib` is its peak over the steps of the window."""
        self._reset()
        yield
        if self._resets:
            self._phases[name] = max(self._phases.get(name, 0), self._update_peak())

    def scalars(self) -> dict[str, float]:
        """GiB by TensorBoard tag: the peak so far, and that of each phase since the last call."""
        self._update_peak()
        peaks = {f"memory/{name}_peak_gib": peak / 2**30 for name, peak in self._phases.items()}
        self._phases = {}
        return {"memory/peak_gib": self._highest / 2**30, **peaks}

    def _reset(self) -> None:
        self._update_peak()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._resets:
            _CLEAR_REFS.write_text(_RESET_PEAK)

    def _update_peak(self) -> int:
        """The peak since the last reset, after updating the highest."""
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
    """Peak resident bytes."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024


class ContextTraffic:
    """Bytes that this rank's layers sent to other context ranks in training steps."""

    def __init__(self, model: nn.Module):
        shards = (getattr(module, "cp_shard", None) for module in model.modules())
        self._layers = [shard.traffic for shard in shards if isinstance(shard, GroupShard)]
        self._sent: Counter[str] = Counter()
        self._late = 0
        self._steps = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wraps a training step; traffic of evaluations does not count."""
        for layer in self._layers:
            layer.take()
        yield
        self._steps += 1
        for layer in self._layers:
            sent, late = layer.take()
            self._sent += sent
            self._late += late

    def scalars(self) -> dict[str, float]:
        """Means since the last call, by TensorBoard tag; empty without context parallelism.

        `traffic/context_KIND_mib`: MiB sent by this rank per layer and step. `traffic/late_exchanges`: states per step
        that had not arrived when local work was done (on CPU only; a GPU's queue hides them).
        """
        if not self._layers:
            return {}
        share = 1 / (2**20 * len(self._layers) * self._steps)
        scalars = {f"traffic/context_{kind}_mib": sent * share for kind, sent in self._sent.items()}
        scalars["traffic/late_exchanges"] = self._late / self._steps
        self._sent, self._late, self._steps = Counter(), 0, 0
        return scalars

"""What a step costs this process, as numbers to log: memory by phase, and bytes sent between shards of a sequence."""

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


class ContextTraffic:
    """Sums what the layers of this process have sent in training steps."""

    def __init__(self, model: nn.Module):
        shards = (getattr(module, "cp_shard", None) for module in model.modules())
        self._layers = [shard.traffic for shard in shards if isinstance(shard, GroupShard)]
        self._sent: Counter[str] = Counter()
        self._late = 0
        self._steps = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a training step; what evaluations sent before is left out."""
        for layer in self._layers:
            layer.take()
        yield
        self._steps += 1
        for layer in self._layers:
            sent, late = layer.take()
            self._sent += sent
            self._late += late

    def scalars(self) -> dict[str, float]:
        """Since the last call, under TensorBoard tags; nothing where no sequence is cut.

        `traffic/context_KIND_mib` is what this process sends per layer and step; `traffic/late_exchanges` counts,
        per step, states for which local work was over too early (on CPU; a GPU's queue hides them from the count).
        """
        if not self._layers:
            return {}
        share = 1 / (2**20 * len(self._layers) * self._steps)
        scalars = {f"traffic/context_{kind}_mib": sent * share for kind, sent in self._sent.items()}
        scalars["traffic/late_exchanges"] = self._late / self._steps
        self._sent, self._late, self._steps = Counter(), 0, 0
        return scalars

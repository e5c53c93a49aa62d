"""Finds the rank that slows the others down."""

import socket
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megakernel.parallel import Mesh


class LocalWork:
    """Measures each rank's work in a step before it can have waited for another replica, and compares ranks.

    Local work is reading data and the forward passes; after the gradient exchange every rank is as slow as the slowest.
    Ranks of one replica (tensor, context) communicate in the forward pass and slow each other down, as do all ranks
    under ZeRO 3; then the first rank of the slow group is reported. A pipeline stage is compared with the same stage of
    other replicas.
    """

    def __init__(self, model: nn.Module, mesh: Mesh):
        """model: the module that DeepSpeed calls. Called on all ranks."""
        self._mesh = mesh
        self._hosts = mesh.gather_objects(socket.gethostname())
        self._seconds = 0.0
        self._began: Any = None
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)
        self.slowest: dict[str, Any] = {}
        """rank, host and straggle of the last window, for heartbeat.json."""

    def scalars(self, steps: int, data_seconds: float, step_seconds: float) -> dict[str, float]:
        """Metrics since the last call, by TensorBoard tag; called on all ranks, after synchronizing with the device.

        steps: steps since then. data_seconds, step_seconds: means per step on this rank. `health/slowest_rank`: the
        slowest rank; `health/straggle`: its local work over the median of the ranks with the same layers;
        `health/data_share`: the largest share of a step that any rank spends on data.
        """
        forward = self._seconds + sum(begin.elapsed_time(end) for begin, end in self._spans) / 1e3
        self._seconds = 0.0
        self._spans.clear()
        rows = self._mesh.gather_numbers([forward / steps + data_seconds, data_seconds / step_seconds])
        rank, straggle = slowest([work for work, _ in rows], stages=self._mesh.pp.size)
        self.slowest = {"rank": rank, "host": self._hosts[rank], "straggle": straggle}
        return {
            "health/slowest_rank": float(rank),
            "health/straggle": straggle,
            "health/data_share": max(share for _, share in rows),
        }

    def _begin(self, model: nn.Module, arguments: object) -> None:
        if model.training:
            self._began = self._now()

    def _end(self, model: nn.Module, arguments: object, output: object) -> None:
        if not model.training:
            return
        if self._mesh.device.type == "cuda":
            self._spans.append((self._began, self._now()))
        else:
            self._seconds += self._now() - self._began

    def _now(self) -> Any:
        """A CUDA event, because kernels run asynchronously; on CPU, seconds."""
        if self._mesh.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def slowest(seconds: Sequence[float], stages: int = 1) -> tuple[int, float]:
    """The rank with the longest work relative to the median of its stage, and that ratio.

    seconds: work of each rank, stage after stage. The lower median: of two ranks, the faster one.
    """
    size = len(seconds) // stages
    ratios = []
    for rank, own in enumerate(seconds):
        first = rank // size * size
        ratios.append(own / statistics.median_low(seconds[first : first + size]))
    rank = max(range(len(ratios)), key=ratios.__getitem__)
    return rank, ratios[rank]

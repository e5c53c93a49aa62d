"""Which rank holds the others up."""

import socket
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megakernel.parallel import Mesh


class LocalWork:
    """Measures how long this process works in a step before it can have waited for another replica, and compares.

    Local work is reading data and the forward passes: gradients are exchanged afterwards, and from then on every rank
    is as slow as the slowest. Ranks of one replica (tensor, context) exchange within the forward pass and go in step,
    as all ranks do under ZeRO 3, which fetches weights there: a slow rank then slows its whole replica, and the first
    rank of it is named. Pipeline stages do different work; each is compared with its like in other replicas.
    """

    def __init__(self, model: nn.Module, mesh: Mesh):
        """model: what DeepSpeed calls forward of. Called on all ranks."""
        self._mesh = mesh
        self._hosts = mesh.gather_objects(socket.gethostname())
        self._seconds = 0.0
        self._began: Any = None
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)
        self.slowest: dict[str, Any] = {}
        """rank, host and straggle of the last window; for those who look from outside."""

    def scalars(self, steps: int, data_seconds: float, step_seconds: float) -> dict[str, float]:
        """Since the last call, under TensorBoard tags; on all ranks, after the device has been waited for.

        steps: so many since then. data_seconds, step_seconds: means of one step on this rank.
        `health/straggle` is the slowest rank's local work over the median of the ranks with the same layers,
        `health/slowest_rank` that rank; `health/data_share` is the share of a step that the rank spends on data which
        spends most.
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
        """An event on a device whose queue runs on behind the calls, else seconds."""
        if self._mesh.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def slowest(seconds: Sequence[float], stages: int = 1) -> tuple[int, float]:
    """The rank whose work is longest beside that of the ranks of its stage, and how many times their median.

    seconds: of each rank, stage after stage. Of an even number the lower median counts: of two ranks the faster one.
    """
    size = len(seconds) // stages
    ratios = []
    for rank, own in enumerate(seconds):
        first = rank // size * size
        ratios.append(own / statistics.median_low(seconds[first : first + size]))
    rank = max(range(len(ratios)), key=ratios.__getitem__)
    return rank, ratios[rank]

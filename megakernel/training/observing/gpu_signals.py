"""What the GPUs of a run report: their state in curves and `status`, and a line if one is slowed down or damaged."""

import math
import socket
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megakernel.parallel import Mesh

from .nvml import NOTHING, SLOWDOWNS, GpuState, NoReadings, NvmlGpu, uuid_of

_MOST_NODES = 16
"""Nodes up to which each has curves of its own."""

_MOST_NAMES = 8
"""GPUs that one line names."""


class GpuSignals:
    """The GPU of each rank, and on rank 0 those of all; empty on machines without GPUs.

    Every rank makes one, and calls `sample` and `scalars` for the same steps. note: prints a line.
    """

    def __init__(self, mesh: Mesh, note: Callable[[str], object]):
        self._mesh = mesh
        self._note = note
        self._latest = NOTHING
        self._wanted = threading.Event()
        self._told: set[tuple[int, str]] = set()
        self._hosts: list[str] = []
        self.found: dict[str, Any] = {}
        """What is wrong with which GPUs at the last logged step, for heartbeat.json: `gpus`, if anything is."""
        uuid = uuid_of(mesh.device)
        if uuid is None:
            return
        try:
            gpu, missing = NvmlGpu(uuid), None
        except NoReadings as error:
            gpu, missing = None, str(error)
        every = mesh.gather_objects((socket.gethostname(), missing))
        lacking = [(rank, host, why) for rank, (host, why) in enumerate(every) if why is not None]
        if lacking:
            rank, host, why = lacking[0]
            note(f"no state of {len(lacking)} of {len(every)} GPUs is logged (rank {rank} on {host}: {why})")
        if len(lacking) < len(every):
            self._hosts = [host for host, _ in every]
        if gpu is not None:
            # A driver whose GPU is lost may not answer: no step waits for it.
            threading.Thread(target=self._read, args=(gpu,), name="gpu signals", daemon=True).start()

    def sample(self) -> None:
        """Have this rank's GPU read during the step that begins now, for the next `scalars`."""
        self._wanted.set()

    def scalars(self) -> dict[str, float]:
        """The last readings by TensorBoard tag, on rank 0; called on all ranks. Prints a line for new faults."""
        if not self._hosts:
            return {}
        rows = self._mesh.gather_numbers(self._latest)
        if self._mesh.rank != 0:
            return {}
        readings = [GpuState(*row) for row in rows]
        faults = dict(found for rank, reading in enumerate(readings) for found in _faults(rank, reading))
        self._tell({found: text for found, text in faults.items() if found not in self._told})
        named = [f"{self._name(rank)} {text}" for (rank, _), text in faults.items()]
        self.found = {"gpus": _listed(named)} if named else {}
        return tags(readings, self._hosts)

    def _read(self, gpu: NvmlGpu) -> None:
        while self._wanted.wait():
            self._wanted.clear()
            self._latest = gpu.read()

    def _name(self, rank: int) -> str:
        return f"GPU of rank {rank} on {self._hosts[rank]}"

    def _tell(self, new: Mapping[tuple[int, str], str]) -> None:
        self._told.update(new)
        for kind, remedy in _REMEDIES.items():
            named = [f"{self._name(rank)} {text}" for (rank, its), text in new.items() if its == kind]
            if named:
                self._note(f"warning: {_listed(named)}; {remedy}")


_REMEDIES = {
    "slowdown": "all ranks wait for it: have cooling and power of the node checked, or --exclude it",
    "errors": "its memory is damaged: have the node drained, or --exclude it",
    "reset": "it needs a reset, or an exchange if that does not help: have the node drained",
    "xid": "docs.nvidia.com/deploy/xid-errors says what the number means",
}
"""Kind of fault -> what to do."""


def _faults(rank: int, reading: GpuState) -> Iterator[tuple[tuple[int, str], str]]:
    """((rank, kind), what is wrong) of a GPU."""
    if math.isfinite(reading.slowdowns):
        reasons = [name for bit, name in SLOWDOWNS.items() if int(reading.slowdowns) & bit]
        if reasons:
            state = f"{reading.sm_clock_mhz:,.0f} MHz, {reading.temperature_c:.0f} °C"
            yield (rank, "slowdown"), f"is slowed down ({', '.join(reasons)}; {state})"
    if reading.uncorrectable_errors > 0:
        yield (rank, "errors"), f"has {reading.uncorrectable_errors:.0f} uncorrectable memory errors"
    if reading.needs_reset > 0:
        yield (rank, "reset"), "has memory that is to be replaced"
    if reading.xid_events > 0:
        yield (rank, "xid"), f"has had {reading.xid_events:.0f} Xid errors, the last {reading.last_xid:.0f}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")


def tags(readings: Sequence[GpuState], hosts: Sequence[str]) -> dict[str, float]:
    """The state of all GPUs by TensorBoard tag; of each node too, if there are several but not too many.

    hosts: node of each reading. What no GPU tells is left out.
    """
    scalars = _summary(readings, "gpu/{}")
    nodes = sorted(set(hosts))
    if 1 < len(nodes) <= _MOST_NODES:
        for node in nodes:
            its = [reading for reading, host in zip(readings, hosts) if host == node]
            scalars |= _summary(its, "gpu/{}/" + node.replace("/", "_"))
    return scalars


def _summary(readings: Sequence[GpuState], tag: str) -> dict[str, float]:
    def known(name: str) -> list[float]:
        return [value for reading in readings if math.isfinite(value := getattr(reading, name))]

    slow = [any(int(bits) & bit for bit in SLOWDOWNS) for bits in known("slowdowns")]
    values = {
        "utilization": _of(statistics.fmean, known("utilization")),
        "utilization_min": _of(min, known("utilization")),
        "power_w": _of(statistics.fmean, known("power_w")),
        "sm_clock_mhz": _of(statistics.fmean, known("sm_clock_mhz")),
        "sm_clock_mhz_min": _of(min, known("sm_clock_mhz")),
        "temperature_c": _of(max, known("temperature_c")),
        "memory_gib": _of(max, known("memory_gib")),
        "slowed_down": _of(sum, slow),
        "uncorrectable_errors": _of(sum, known("uncorrectable_errors")),
        "retired": _of(sum, known("retired")),
        "xid_events": _of(sum, known("xid_events")),
    }
    return {tag.format(name): value for name, value in values.items() if value is not None}


def _of(combine: Callable[[Any], float], values: Sequence[float]) -> float | None:
    return float(combine(values)) if values else None

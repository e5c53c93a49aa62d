"""One GPU's state, read through NVIDIA's management library (the package nvidia-ml-py, module `pynvml`)."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from megakernel.config.extras import lacking


class GpuState(NamedTuple):
    """A GPU at one moment; NaN for what this GPU or its driver does not tell."""

    utilization: float
    """Share of the last second or less in which a kernel ran, %."""

    power_w: float
    """Power draw of the board, W."""

    sm_clock_mhz: float
    """Clock of the streaming multiprocessors, MHz."""

    temperature_c: float
    """Temperature of the chip, degrees Celsius."""

    memory_gib: float
    """Memory in use, by all processes, GiB."""

    slowdowns: float
    """Bits of the reasons for which the clocks are lowered now: `SLOWDOWNS`, and others."""

    uncorrectable_errors: float
    """Memory errors that ECC could not correct, since the driver was loaded."""

    retired: float
    """Pages of memory that are retired, or rows that are replaced, for uncorrectable errors, in the GPU's life."""

    needs_reset: float
    """1 if such a repair waits for a reset of the GPU, or has failed; else 0."""

    xid_events: float
    """Xid errors of the driver since this process began to watch."""

    last_xid: float
    """Number of the last of them; 0: none."""


NOTHING = GpuState(*[math.nan] * len(GpuState._fields))

SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}
"""Bits of NVML's reasons that mean a fault of cooling or power; a power limit that is reached (4) does not."""

_MOST_EVENTS = 100
"""Events that one reading takes from the driver's queue."""


class NoReadings(Exception):
    """There are none on this machine; the text is one line that says why."""


def uuid_of(device: torch.device) -> str | None:
    """The UUID of a CUDA device, which NVML numbers otherwise than CUDA; None for other devices."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


class NvmlGpu:
    """A GPU by its UUID, with or without the prefix `GPU-`. Raises NoReadings."""

    def __init__(self, uuid: str):
        if line := lacking("gpu/...", "pynvml"):
            raise NoReadings(line)
        import pynvml

        self._nvml = pynvml
        self._unknown = pynvml.NVMLError
        try:
            pynvml.nvmlInit()
            self._device = self._find(uuid)
        except pynvml.NVMLError as error:
            raise NoReadings(f"NVIDIA's driver says: {error}") from None
        self._xids = 0
        self._last_xid = 0
        self._events: Any = None
        with suppress(self._unknown):  # partitions of a GPU and some containers have no events
            events = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(self._device, pynvml.nvmlEventTypeXidCriticalError, events)
            self._events = events

    def read(self) -> GpuState:
        """The present state; takes milliseconds, and does not wait for the GPU's work."""
        nvml, device = self._nvml, self._device
        self._take_events()

        def value(get: Callable[..., Any], *arguments: Any) -> float:
            try:
                return float(get(device, *arguments))
            except self._unknown:
                return math.nan

        volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        is_watched = self._events is not None
        return GpuState(
            utilization=value(lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
            power_w=value(nvml.nvmlDeviceGetPowerUsage) / 1000,
            sm_clock_mhz=value(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            temperature_c=value(self._temperature),
            memory_gib=value(lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used) / 2**30,
            slowdowns=value(self._slowdowns),
            uncorrectable_errors=value(nvml.nvmlDeviceGetTotalEccErrors, *volatile),
            retired=value(self._retired),
            needs_reset=value(self._needs_reset),
            xid_events=float(self._xids) if is_watched else math.nan,
            last_xid=float(self._last_xid) if is_watched else math.nan,
        )

    def _find(self, uuid: str) -> Any:
        nvml = self._nvml
        names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
        for name in names[:-1]:
            with suppress(nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument):
                return nvml.nvmlDeviceGetHandleByUUID(name)
        return nvml.nvmlDeviceGetHandleByUUID(names[-1])

    def _temperature(self, device: Any) -> float:
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetTemperatureV(device, nvml.NVML_TEMPERATURE_GPU)
        except self._unknown:  # older drivers
            return nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)

    def _slowdowns(self, device: Any) -> float:
        try:
            return self._nvml.nvmlDeviceGetCurrentClocksEventReasons(device)
        except self._unknown:  # older drivers
            return self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)

    def _retired(self, device: Any) -> float:
        """Since Ampere, rows of memory are replaced by spare ones; before, pages were retired."""
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetRemappedRows(device)[1]
        except self._unknown:
            return len(
                nvml.nvmlDeviceGetRetiredPages(device, nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
            )

    def _needs_reset(self, device: Any) -> float:
        try:
            return any(self._nvml.nvmlDeviceGetRemappedRows(device)[2:])
        except self._unknown:
            return self._nvml.nvmlDeviceGetRetiredPagesPendingStatus(device)

    def _take_events(self) -> None:
        if self._events is None:
            return
        for _ in range(_MOST_EVENTS):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._unknown:  # a timeout: there is none
                return
            self._xids += 1
            self._last_xid = int(event.eventData)

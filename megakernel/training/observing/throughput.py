"""Training speed between two logged steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Throughput:
    """Measures windows of steps; `scalars` ends a window and starts the next.

    Times are of this rank, which waits for the others in every step; tokens are those of all ranks. CPU time is that
    of all threads of this process; unlike the others it does not grow when programs share the cores.
    devices: number of ranks. peak_tflops: of one device; None: no throughput/mfu. steps: steps in the window so far.
    """

    def __init__(
        self,
        device: torch.device,
        devices: int,
        peak_tflops: float | None,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ):
        self._device = device
        self._devices = devices
        self._peak_tflops = peak_tflops
        self._clock, self._cpu_clock = clock, cpu_clock
        self._open_window()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Wraps waiting for data: throughput/data_time, a part of throughput/step_time."""
        start = self._clock()
        yield
        self._loading += self._clock() - start

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Wraps evaluation, saving and other work that does not count as step time."""
        self._wait_for_device()
        start, cpu_start = self._clock(), self._cpu_clock()
        yield
        self._wait_for_device()
        self._excluded += self._clock() - start
        self._cpu_excluded += self._cpu_clock() - cpu_start

    def step(self, tokens: int, flops_per_token: float) -> None:
        """Count a finished step of `tokens` over all ranks.

        flops_per_token: forward and backward, without recomputation; depends on sequence length.
        """
        self.steps += 1
        self._tokens += tokens
        self._flops += tokens * flops_per_token

    def scalars(self) -> dict[str, float]:
        """Means over the steps of the window, at least one, by TensorBoard tag; times in seconds."""
        self._wait_for_device()
        seconds = self._clock() - self._start - self._excluded
        cpu_seconds = self._cpu_clock() - self._cpu_start - self._cpu_excluded
        per_device = self._tokens / seconds / self._devices
        tflops = self._flops / seconds / self._devices / 1e12
        means = {
            "throughput/tokens_per_sec": self._tokens / seconds,
            "throughput/tokens_per_sec_per_device": per_device,
            "throughput/tflops": tflops,
            "throughput/step_time": seconds / self.steps,
            "throughput/data_time": self._loading / self.steps,
            "throughput/cpu_time": cpu_seconds / self.steps,
        }
        if self._peak_tflops is not None:
            means["throughput/mfu"] = tflops / self._peak_tflops
        self._open_window()
        return means

    def _open_window(self) -> None:
        self._start, self._cpu_start = self._clock(), self._cpu_clock()
        self.steps = self._tokens = 0
        self._flops = self._loading = self._excluded = self._cpu_excluded = 0.0

    def _wait_for_device(self) -> None:
        # Kernels are asynchronous: without synchronization their time would be counted in the wrong place.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

import pytest
import torch

from megakernel.training.observing.peak_speed import peak_tflops
from megakernel.training.observing.throughput import Throughput


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def meter(clock: Clock, peak: float | None = None) -> Throughput:
    return Throughput(torch.device("cpu"), 2, peak_tflops=peak, clock=clock)


def train(throughput: Throughput, clock: Clock, steps: int) -> None:
    for _ in range(steps):
        with throughput.loading():
            clock.now += 0.5
        clock.now += 1.5
        throughput.step(tokens=1000, flops_per_token=1e10)


def test_times_and_rates_are_means_over_the_window(clock):
    throughput = meter(clock)
    train(throughput, clock, 4)
    scalars = throughput.scalars()
    assert scalars["throughput/step_time"] == 2.0
    assert scalars["throughput/data_time"] == 0.5
    assert scalars["throughput/tokens_per_sec"] == 500.0
    assert scalars["throughput/tokens_per_sec_per_device"] == 250.0
    assert scalars["throughput/tflops"] == 2.5


def test_a_window_with_two_sequence_lengths_counts_the_flops_of_each(clock):
    throughput = meter(clock)
    clock.now += 1.0
    throughput.step(tokens=1000, flops_per_token=1e10)
    clock.now += 3.0
    throughput.step(tokens=3000, flops_per_token=5e10)
    scalars = throughput.scalars()
    assert scalars["throughput/tokens_per_sec"] == 1000.0
    # (1000 * 1e10 + 3000 * 5e10) FLOPs in 4 seconds on 2 devices.
    assert scalars["throughput/tflops"] == 20.0


def test_evaluation_and_saving_are_excluded_from_step_times(clock):
    throughput = meter(clock)
    train(throughput, clock, 2)
    with throughput.excluded():
        clock.now += 100.0
    train(throughput, clock, 2)
    assert throughput.scalars()["throughput/step_time"] == 2.0


def test_cpu_time_is_a_mean_over_the_window_without_what_is_excluded():
    clock, cpu = Clock(), Clock()
    throughput = Throughput(torch.device("cpu"), 2, peak_tflops=None, clock=clock, cpu_clock=cpu)
    for window in (1, 2):
        for _ in range(4):
            cpu.now += 0.25 * window
            train(throughput, clock, 1)
        with throughput.excluded():
            cpu.now += 10.0
        assert throughput.scalars()["throughput/cpu_time"] == 0.25 * window


def test_each_window_is_measured_on_its_own(clock):
    throughput = meter(clock)
    clock.now += 50.0  # compiling, in the first window
    train(throughput, clock, 1)
    throughput.scalars()
    train(throughput, clock, 1)
    assert throughput.scalars()["throughput/step_time"] == 2.0


def test_mfu_is_the_fraction_of_the_peak_and_omitted_if_that_is_unknown(clock):
    throughput = meter(clock, peak=5.0)
    train(throughput, clock, 1)
    assert throughput.scalars()["throughput/mfu"] == 0.5
    throughput = meter(clock)
    train(throughput, clock, 1)
    assert "throughput/mfu" not in throughput.scalars()


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_of_known_devices(name, peak):
    assert peak_tflops(name) == peak

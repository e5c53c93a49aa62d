"""The state of GPUs: read by the real nvidia-ml-py from a library that stands in for the driver's (`tests/nvml.py`)."""

import json
import math
import time

import pytest
import torch

from launch.run_progress import RunProgress
from megakernel.config import extras
from megakernel.training.observing import gpu_signals, nvml
from megakernel.training.observing.gpu_signals import GpuSignals, tags
from megakernel.training.observing.nvml import NOTHING, GpuState, NoReadings, NvmlGpu
from tests.nvml import UUID, fake_nvml


@pytest.fixture
def driver(tmp_path):
    with fake_nvml(tmp_path) as library:
        yield library


class OneRank:
    """A mesh of one process, or of several with the same GPU."""

    def __init__(self, hosts=("n1",), rows=None):
        self.device, self.rank, self.hosts, self.rows = torch.device("cuda"), 0, hosts, rows

    def gather_objects(self, value):
        return [(host, value[1]) for host in self.hosts]

    def gather_numbers(self, values):
        return self.rows or [list(values) for _ in self.hosts]


@pytest.fixture
def signals(driver, monkeypatch):
    """The signals of ranks whose GPU is the library's, and what they print."""
    monkeypatch.setattr(gpu_signals, "uuid_of", lambda device: UUID)
    said = []

    def make(**options):
        return GpuSignals(OneRank(**options), said.append), said

    return make


def sampled(one):
    """The scalars after a reading has arrived."""
    before = one._latest
    one.sample()
    deadline = time.monotonic() + 30
    while one._latest is before:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return one.scalars()


HEALTHY = GpuState(97, 612.5, 1755, 71, 62, 4, 0, 2, 0, 0, 0)


def test_every_value_is_read_with_the_functions_of_the_library(driver):
    assert NvmlGpu(UUID).read() == HEALTHY
    assert NvmlGpu(f"GPU-{UUID}").read() == HEALTHY


def test_older_drivers_and_gpus_tell_the_same_by_other_functions(driver):
    driver.set(is_old=1, remap_pending=1)
    driver.set_wide(reasons=0x48)
    assert NvmlGpu(UUID).read() == HEALTHY._replace(slowdowns=0x48, retired=3, needs_reset=1)


def test_a_part_of_a_gpu_tells_only_its_memory(driver):
    driver.set(is_partition=1)
    reading = NvmlGpu(UUID).read()
    assert reading.memory_gib == 62
    assert all(math.isnan(value) for value in reading._replace(memory_gib=math.nan))


def test_xid_errors_are_counted_from_the_start_and_the_last_one_is_named(driver):
    gpu = NvmlGpu(UUID)
    assert gpu.read().xid_events == 0
    driver.xid(63, 94)
    assert gpu.read()[-2:] == (2, 94)
    assert gpu.read()[-2:] == (2, 94), "each is taken from the queue once"


def test_a_driver_that_is_not_loaded_and_a_gpu_that_is_not_there_are_one_line(driver):
    with pytest.raises(NoReadings, match="NVIDIA's driver says: Not Found"):
        NvmlGpu("00000000-0000-0000-0000-000000000000")
    driver.set(init=9)
    with pytest.raises(NoReadings, match="NVIDIA's driver says: Driver Not Loaded"):
        NvmlGpu(UUID)


@pytest.mark.parametrize("missing", ["package", "driver"])
def test_without_library_or_driver_one_line_says_so_and_nothing_is_logged(missing, monkeypatch):
    monkeypatch.setattr(gpu_signals, "uuid_of", lambda device: UUID)
    if missing == "package":
        monkeypatch.setattr(extras, "find_spec", lambda module: None)
    else:
        pynvml = pytest.importorskip("pynvml")
        monkeypatch.setattr(pynvml, "nvmlLib", None)
        monkeypatch.setattr(
            pynvml, "CDLL", lambda name: 1 / 0 if name != "libnvidia-ml.so.1" else _no_library()
        )
    said = []
    one = GpuSignals(OneRank(), said.append)
    one.sample()
    assert one.scalars() == one.found == {}
    (line,) = said
    assert line.startswith("no state of 1 of 1 GPUs is logged (rank 0 on n1: ")
    assert ("needs nvidia-ml-py; pip install" in line) == (missing == "package")
    assert ("NVIDIA's driver says: NVML Shared Library Not Found" in line) == (missing == "driver")


def _no_library():
    raise OSError("no such file")


def test_a_machine_without_gpus_prints_and_logs_nothing():
    mesh = OneRank()
    mesh.device = torch.device("cpu")
    said = []
    one = GpuSignals(mesh, said.append)
    one.sample()
    assert (one.scalars(), one.found, said) == ({}, {}, [])


def test_a_healthy_gpu_at_its_power_limit_is_logged_without_a_warning(signals, driver):
    one, said = signals()
    assert one.scalars() == {}, "no reading has come yet, and no step waits for one"
    assert sampled(one) == {
        "gpu/utilization": 97,
        "gpu/utilization_min": 97,
        "gpu/power_w": 612.5,
        "gpu/sm_clock_mhz": 1755,
        "gpu/sm_clock_mhz_min": 1755,
        "gpu/temperature_c": 71,
        "gpu/memory_gib": 62,
        "gpu/slowed_down": 0,
        "gpu/uncorrectable_errors": 0,
        "gpu/retired": 2,
        "gpu/xid_events": 0,
    }
    assert said == []


def test_each_fault_is_one_line_once(signals, driver):
    one, said = signals(hosts=("n1", "n2"))
    driver.set(sm_clock=1200, celsius=91)
    driver.set_wide(reasons=0x44)
    scalars = sampled(one)
    assert (scalars["gpu/slowed_down"], scalars["gpu/slowed_down/n2"]) == (2, 1)
    slowed = "is slowed down (thermal slowdown by hardware; 1,200 MHz, 91 °C)"
    expected = f"GPU of rank 0 on n1 {slowed}, GPU of rank 1 on n2 {slowed}"
    assert said == [f"warning: {expected}; {gpu_signals._REMEDIES['slowdown']}"]
    assert one.found == {"gpus": expected}

    driver.set(remap_pending=1)
    driver.set_wide(errors=3, reasons=0)
    driver.xid(94)
    scalars = sampled(one)
    assert (scalars["gpu/uncorrectable_errors"], scalars["gpu/slowed_down"]) == (6, 0)
    assert len(said) == 4
    assert "GPU of rank 0 on n1 has 3 uncorrectable memory errors" in said[1]
    assert "has memory that is to be replaced" in said[2]
    assert "has had 1 Xid errors, the last 94" in said[3]
    sampled(one)
    assert len(said) == 4


def test_a_thousand_faulty_gpus_are_one_line_that_names_eight(signals):
    rows = [list(HEALTHY._replace(slowdowns=8))] * 1000
    one, said = signals(hosts=("n1",) * 1000, rows=rows)
    one.scalars()
    (line,) = said
    assert line.count("GPU of rank") == 8
    assert "and 992 more; all ranks wait for it" in line


def test_curves_have_means_extremes_and_sums_and_leave_out_what_is_unknown():
    cold = HEALTHY._replace(utilization=3, sm_clock_mhz=345, temperature_c=40, uncorrectable_errors=2)
    scalars = tags([HEALTHY, cold, NOTHING], ["a", "b", "b"])
    assert (scalars["gpu/utilization"], scalars["gpu/utilization_min"]) == (50, 3)
    assert (scalars["gpu/sm_clock_mhz"], scalars["gpu/sm_clock_mhz_min"]) == (1050, 345)
    assert (scalars["gpu/temperature_c"], scalars["gpu/uncorrectable_errors"]) == (71, 2)
    assert (scalars["gpu/temperature_c/a"], scalars["gpu/temperature_c/b"]) == (71, 40)
    assert tags([NOTHING], ["a"]) == {}
    many = tags([HEALTHY] * 17, [f"n{number}" for number in range(17)])
    assert not [tag for tag in many if tag.count("/") == 2], "17 nodes would have hundreds of curves"


def test_status_shows_the_gpus_of_a_run_that_trains(tmp_path):
    logged = tags([HEALTHY], ["n1"])
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3, **logged}) + "\n")
    now = RunProgress.read(tmp_path)
    assert now.gpus == "97 % busy, 612 W, 1,755 MHz, at most 71 °C, at most 62.0 GiB"
    assert RunProgress.read(tmp_path, since=math.inf).gpus == "", "of an earlier start"


def test_the_uuid_of_a_cpu_is_none():
    assert nvml.uuid_of(torch.device("cpu")) is None

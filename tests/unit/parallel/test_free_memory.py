import psutil
import pytest

from megakernel.parallel import device


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A job's cgroup, in which this process is, and its own."""
    job = tmp_path / "slurm" / "job_1"
    step = job / "step_0"
    step.mkdir(parents=True)
    own = tmp_path / "cgroup"
    own.write_text("0::/slurm/job_1/step_0\n")
    monkeypatch.setattr(device, "_CGROUPS", tmp_path)
    monkeypatch.setattr(device, "_OWN_CGROUP", own)
    return job, step


def limit(group, most: str, used: int, cached: int) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon {used - cached}\nactive_file {cached - 1}\ninactive_file 1\n")


def test_a_jobs_limit_counts_and_its_page_cache_does_not(groups):
    job, step = groups
    limit(step, "max", used=900, cached=300)
    limit(job, "1000", used=900, cached=300)
    assert device.free_host_memory() == 400


def test_without_a_limit_the_machines_memory_counts(groups, monkeypatch):
    _, step = groups
    limit(step, "max", used=900, cached=300)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("memory", (), {"available": 12345}))
    assert device.free_host_memory() == 12345
    monkeypatch.setattr(device, "_OWN_CGROUP", step / "absent")
    assert device.free_host_memory() == 12345

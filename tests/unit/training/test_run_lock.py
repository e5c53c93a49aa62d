import subprocess
import sys
import time
from functools import partial

import pytest

from launch import training
from launch.cli import main
from launch.exit_status import ExitStatus
from megakernel.config import InUse, load, to_yaml
from megakernel.training.run_folder import RunLock

from ..config import trees

HOLDER_SCRIPT = """
import sys
from pathlib import Path
from megakernel.training.run_folder import RunLock
held = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lock_holder(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER_SCRIPT, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_start_is_refused_with_the_process_that_holds_the_lock(lock_holder, tmp_path):
    with pytest.raises(InUse, match=f"process {lock_holder.pid} on .* writes into .*; wait until it ends"):
        RunLock(tmp_path, wait_seconds=0.0)


def test_a_command_on_a_locked_run_exits_with_in_use(lock_holder, tmp_path, capsys, monkeypatch):
    config = trees.file(tmp_path, run={"root": str(tmp_path.parent), "name": tmp_path.name})
    (tmp_path / "config.yaml").write_text(to_yaml(load(config)))
    monkeypatch.setattr(training, "RunLock", partial(RunLock, wait_seconds=0.0))
    assert main(["pretrain", str(config)]) == ExitStatus.IN_USE
    (line,) = capsys.readouterr().err.splitlines()
    assert f"run.name={tmp_path.name}: process {lock_holder.pid} on" in line


def test_a_killed_process_holds_no_lock(lock_holder, tmp_path):
    lock_holder.kill()
    RunLock(tmp_path, wait_seconds=5.0)


def test_a_start_waits_for_a_process_that_is_ending(lock_holder, tmp_path):
    started = time.monotonic()
    lock_holder.stdin.close()
    RunLock(tmp_path)
    assert time.monotonic() - started < 10


def test_the_lock_of_another_host_is_refused_until_its_lease_has_been_observed(lock_holder, tmp_path):
    (tmp_path / "lock").write_text("process 7 on another-host\n")
    started = time.monotonic()
    with pytest.raises(InUse, match="process 7 on another-host"):
        RunLock(tmp_path, wait_seconds=0.0, lease_seconds=1.0)
    assert time.monotonic() - started > 1.0

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

HOLD = """
import sys
from pathlib import Path
from megakernel.training.run_folder import RunLock
held = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_start_is_told_who_writes_there(holder, tmp_path):
    with pytest.raises(InUse, match=f"process {holder.pid} on .* writes into .*; wait until it ends"):
        RunLock(tmp_path, wait_seconds=0.0)


def test_a_command_whose_run_is_written_into_ends_with_a_status_of_its_own(
    holder, tmp_path, capsys, monkeypatch
):
    config = trees.file(tmp_path, run={"root": str(tmp_path.parent), "name": tmp_path.name})
    (tmp_path / "config.yaml").write_text(to_yaml(load(config)))
    monkeypatch.setattr(training, "RunLock", partial(RunLock, wait_seconds=0.0))
    assert main(["pretrain", str(config)]) == ExitStatus.IN_USE
    (line,) = capsys.readouterr().err.splitlines()
    assert f"run.name={tmp_path.name}: process {holder.pid} on" in line


def test_a_killed_process_holds_nothing(holder, tmp_path):
    holder.kill()
    RunLock(tmp_path, wait_seconds=5.0)


def test_a_start_waits_for_one_that_is_ending(holder, tmp_path):
    begun = time.monotonic()
    holder.stdin.close()
    RunLock(tmp_path)
    assert time.monotonic() - begun < 10


def test_a_host_that_is_gone_holds_it_until_its_lease_ends(holder, tmp_path):
    (tmp_path / "lock").write_text("process 7 on another-host\n")
    begun = time.monotonic()
    with pytest.raises(InUse, match="process 7 on another-host"):
        RunLock(tmp_path, wait_seconds=0.0, lease_seconds=1.0)
    assert time.monotonic() - begun > 1.0

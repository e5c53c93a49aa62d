import subprocess
import sys
import time

import pytest

from megakernel.config import UserError
from megakernel.training.run_lock import RunLock

HOLD = """
import sys
from pathlib import Path
from megakernel.training.run_lock import RunLock
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
    with pytest.raises(UserError, match=f"process {holder.pid} on .* writes into .*; wait until it ends"):
        RunLock(tmp_path, wait_seconds=0.0)


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
    with pytest.raises(UserError, match="process 7 on another-host"):
        RunLock(tmp_path, wait_seconds=0.0, lease_seconds=1.0)
    assert time.monotonic() - begun > 1.0

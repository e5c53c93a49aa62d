"""The parts of the GPU check that need no GPU: pages, time limits, and valid commands."""

import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import PARTS, Check, run, run_all
from benchmarks.kernels.attention.suites import SUITES
from megakernel.config import load

REPOSITORY = Path(__file__).parents[3]


def program(title: str, text: str) -> Check:
    return Check(title, (sys.executable, "-c", text))


def test_the_page_is_written_after_every_program(tmp_path):
    out = tmp_path / "page.md"
    reads = program("second", f"print(open({str(out)!r}).read())")
    first, second = run_all("speed", [program("first", "print('one')"), reads], 60, out)
    assert "| first | passed |" in second.output
    assert "1 of 2 programs" in second.output
    assert (first.status, second.status) == ("passed", "passed")
    assert "    one" in out.read_text()


@pytest.mark.second
def test_a_program_is_killed_with_its_children_at_the_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "GRACE", 0.5)
    text = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    start = time.monotonic()
    cut, late = run_all("speed", [program("long", text), program("late", "")], 5, tmp_path / "page.md")
    assert time.monotonic() - start < 60
    assert (cut.status, late.status) == ("cut off", "no time left")
    child = int(cut.output.splitlines()[0])
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        pytest.fail("the child process is still running")
    assert "| long | cut off |" in (tmp_path / "page.md").read_text()


def test_failed_and_missing_programs_are_distinguished():
    failed = run(program("no", "raise SystemExit(3)"), 60)
    missing = run(Check("tool", ("no-such-tool-anywhere",)), 60)
    assert (failed.status, failed.failed) == ("failed with status 3", True)
    assert (missing.status, missing.failed) == ("not installed", False)


@pytest.mark.parametrize(
    "check", [check for checks in PARTS.values() for check in checks], ids=lambda x: x.title
)
def test_commands_name_existing_files_and_configurations(check):
    arguments = check.command[1:]
    for path in (x for x in arguments if x.startswith(("tests/", "configs/"))):
        assert (REPOSITORY / path).exists()
    if "pretrain" in arguments:
        load(REPOSITORY / arguments[arguments.index("pretrain") + 1], [x for x in arguments if "=" in x])
    if "--suite" in arguments:
        options = dict(pairwise(arguments))
        only = [name for option, name in pairwise(arguments) if option == "--only"]
        limits = (int(options[f"--{name}-tokens"]) for name in ("min", "max"))
        SUITES[options["--suite"]].narrowed(*limits, only)


def test_the_profiled_call_runs_on_a_cpu():
    assert gpu_check.profiled_call("cpu", 70).shape == (2, 4, 1, 64)


def test_without_a_gpu_the_check_ends_with_one_line():
    command = [sys.executable, "-m", "benchmarks.gpu_check", "speed"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["gpu_check: no GPU is here; run it where `nvidia-smi` lists one"]

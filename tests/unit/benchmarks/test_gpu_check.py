"""The parts of the GPU check that need no GPU: pages, time limits, and valid commands."""

import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import PARTS, Check, dry_checks, run, run_all
from benchmarks.kernels.attention.suites import SUITES
from benchmarks.kernels.budget import on_one_device
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
    assert done.stderr.splitlines() == [
        "gpu_check: no GPU is here; run it where `nvidia-smi` lists one, or try it with profile --dry-run"
    ]


def test_the_first_part_profiles_what_people_train():
    first, *rest = PARTS["profile"]
    commands = [" ".join(check.command) for check in (first, *rest)]
    assert "configs/pretrain-350m.yaml" in commands[0]
    assert "seq_len=8192" in commands[0]
    for size in ("seq_len=8192 training.micro_batch_size=4", "seq_len=32768 training.micro_batch_size=1"):
        for model in ("pretrain-350m.yaml training", "attention=softmax", "hybrid.yaml"):
            for compiled in ("compile=none", "compile=layer"):
                assert sum(all(x in line for x in (size, model, compiled)) for line in commands) == 1
    for check in PARTS["profile"]:
        arguments = check.command[1:]
        path = REPOSITORY / next(x for x in arguments if x.startswith("configs/"))
        config = on_one_device(path, [x for x in arguments if "=" in x])
        assert config.training.dtype == "bfloat16"
        assert config.model.vocab_size == 50_257
    assert "profile correctness" in (REPOSITORY / "Makefile").read_text()


@pytest.mark.second
def test_a_dry_run_writes_the_pages_of_small_models(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    checks = dry_checks(tmp_path)
    assert ["compiled" in check.title for check in checks] == [False, False, False, True]
    results = run_all("profile --dry-run", checks[:3], 500, tmp_path / "gpu_profile.md")
    assert [result.status for result in results] == ["passed"] * 3, results
    for check in checks[:3]:
        text = Path(check.command[-1]).read_text()
        assert "## Measured beside counted" in text
        assert "`aten::mm`" in text
        assert check.command[-1] in (tmp_path / "gpu_profile.md").read_text()

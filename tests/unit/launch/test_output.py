"""What becomes of a command whose output, or whose reader, is gone."""

import os
import signal
import subprocess
import sys

import pytest

from launch.cli import COMMANDS, main
from launch.exit_status import ExitStatus

from ..config import trees

CONFIG = "configs/demo.yaml"
PLAN = [CONFIG, "--gpus", "1", "--gpu", "h100"]
PRINTING = {
    "config": ["config", CONFIG],
    "explain": ["config", CONFIG, "--explain", "training"],
    "mechanisms": ["mechanisms"],
    "plan": ["plan", *PLAN],
    "plan --json": ["plan", *PLAN, "--json"],
    "status": ["status", "--root", "nowhere"],
    "monitor": ["monitor", "--root", ".", "--once"],
    "version": ["--version"],
    **{f"{name} --help": [name, "--help"] for name in COMMANDS},
}


@pytest.mark.parametrize("command", PRINTING)
def test_a_reader_who_has_seen_enough_is_no_error(command, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert main(PRINTING[command]) == ExitStatus.BROKEN_PIPE
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("redirected", "status", "said"),
    [
        ("{command} 2>&1 | head -n 0", 141, ""),
        ("{command} nosuch=1 2>&1 | head -n 0", 2, ""),
        ("{command} >&- 2>&- <&- ; exit $?", 0, ""),
        ("{command} nosuch=1 2>&- ; exit $?", 2, ""),
        (
            "{command} >/dev/full ; exit $?",
            1,
            "the output cannot be written or read (No space left on device)",
        ),
        ("{command} nosuch=1 2>/dev/full ; exit $?", 2, ""),
    ],
)
def test_the_shells_redirections_leave_no_traceback(tmp_path, redirected, status, said):
    command = f"{sys.executable} -m launch.cli config {trees.file(tmp_path)}"
    script = redirected.format(command=command) + '; exit "${PIPESTATUS[0]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == status
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == bool(said)


def test_ctrl_c_while_a_command_is_imported_is_one_line():
    script = """
import runpy, signal, sys

class Finder:
    def find_spec(self, name, *rest):
        if name == "launch.submit":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
runpy.run_module("launch.cli", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "")
    assert done.stderr == "megakernel: error: interrupted\n"

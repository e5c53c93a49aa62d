"""Commands whose output cannot be written or is no longer read."""

import io
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
def test_a_closed_pipe_prints_no_error(command, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed_pipe:
        monkeypatch.setattr(sys, "stdout", closed_pipe)
        assert main(PRINTING[command]) == ExitStatus.BROKEN_PIPE
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("redirected", "status", "error"),
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
def test_shell_redirections_cause_no_traceback(tmp_path, redirected, status, error):
    command = f"{sys.executable} -m launch.cli config {trees.file(tmp_path)}"
    script = redirected.format(command=command) + '; exit "${PIPESTATUS[0]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == status
    assert error in done.stderr
    assert len(done.stderr.splitlines()) == bool(error)


def test_characters_that_the_terminal_lacks_are_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    assert main(["mechanisms"]) == 0
    assert b"\\u2014" in written.getvalue()


def test_ctrl_c_while_a_command_is_imported_prints_one_line():
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

"""Commands whose output cannot be written or is no longer read."""

import io
import os
import signal
import subprocess
import sys

import pytest
from rich.table import Table

from launch import evaluate
from launch.cli import COMMANDS, main
from launch.exit_status import ExitStatus
from launch.messages import console, print_error
from megakernel.evaluation.result import Table as Result

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
        pytest.param("{command} nosuch=1 2>&1 | head -n 0", 2, "", marks=pytest.mark.second),
        pytest.param("{command} >&- 2>&- <&- ; exit $?", 0, "", marks=pytest.mark.second),
        pytest.param("{command} nosuch=1 2>&- ; exit $?", 2, "", marks=pytest.mark.second),
        (
            "{command} >/dev/full ; exit $?",
            1,
            "the output cannot be written or read (No space left on device)",
        ),
        pytest.param("{command} nosuch=1 2>/dev/full ; exit $?", 2, "", marks=pytest.mark.second),
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


ESCAPES = "\x1b[31mred\x1b]0;title\x07 \x9b2J \u202etxt"
SHOWN = r"\x1b[31mred\x1b]0;title\x07 \x9b2J \u202etxt"


def test_control_characters_of_foreign_texts_are_shown_and_not_obeyed(capsys, tmp_path):
    print_error(f"{ESCAPES}\nsecond\tline")
    assert capsys.readouterr().err == f"megakernel: error: {SHOWN}\nmegakernel: error: second\tline\n"
    table = Table()
    table.add_column(ESCAPES)
    table.add_row(ESCAPES)
    for value in (ESCAPES, table):
        stream = io.StringIO()
        console(file=stream, width=100).print(value)
        assert SHOWN in stream.getvalue()
        assert "\x1b" not in stream.getvalue()
    assert main(["status", ESCAPES.replace("/", ""), "--root", str(tmp_path)]) != 0
    assert SHOWN in capsys.readouterr().err


def test_a_terminal_gets_no_control_characters_but_a_file_gets_the_text(tmp_path):
    program = tmp_path / "show.py"
    program.write_text(
        "import sys, logging\nfrom launch import cli\n"
        f"text = {ESCAPES!r}\n"
        "cli.COMMANDS['doctor'].run = lambda args: logging.getLogger('x').warning(text) or print(text, end='') or 0\n"
        "sys.exit(cli.main(['doctor']))\n"
    )
    command = [sys.executable, program]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONIOENCODING": "utf-8"}
    piped = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert piped.stdout.decode() == ESCAPES
    assert piped.stderr.decode() == f"{SHOWN}\n"
    mine, its = os.openpty()
    subprocess.run(command, env=environment, stdout=its, check=True)
    os.close(its)
    assert os.read(mine, 1000).decode() == SHOWN
    os.close(mine)


def test_a_line_below_a_table_of_an_evaluation_is_one_line(monkeypatch, capsys):
    """Wrapped, a number would stand on another line than its label."""
    monkeypatch.setenv("COLUMNS", "80")
    line = " ".join(f"label {number}" for number in range(30))

    class Measured:
        def table(self):
            return Result("title", ("a",), [("1",)], below=(line,))

    evaluate._print(Measured())
    assert line in capsys.readouterr().out.splitlines()

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.local import run_ranks
from tests.tiers import tiered

from ..config import trees
from .launching import GLOO_MAXIMUM, INSTALLED_SCRIPT, LAUNCHER_SCRIPT, REPOSITORY, Launch


def test_ranks_listen_on_localhost_only_and_log_each_to_its_own_file(
    tmp_path,
):
    launch = Launch(tmp_path, "listen", maximum=GLOO_MAXIMUM, OMP_NUM_THREADS="3")
    status, out, err = launch.finish()
    assert (status, err) == (0, "")
    assert out == "rank 0 of 2 with 3 threads\n['127.0.0.1']\n"
    assert launch.log(0).endswith(out)
    assert launch.log(1).endswith("rank 1 of 2 with 3 threads\n['127.0.0.1']\n")


CONSOLE_SCRIPT = """
from megakernel.training.observing.console import Console
console = Console(4, total_tokens=4)
console.note("begin")
console.progress(1)
console.progress(2)
console.note("end")
"""


def test_a_terminal_shows_colors_and_a_progress_line_that_the_log_leaves_out(tmp_path):
    (tmp_path / "rank.py").write_text(CONSOLE_SCRIPT)
    terminal, child_terminal = pty.openpty()
    typed = [sys.executable, "-c", LAUNCHER_SCRIPT, str(tmp_path), "", "1", "60"]
    env = {**os.environ, "TERM": "xterm"}
    subprocess.run(typed, cwd=REPOSITORY, env=env, stdout=child_terminal, check=True, timeout=240)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    os.close(child_terminal)
    assert shown.count("\n") == 2
    assert "\x1b[33mbegin\x1b[0m" in shown
    assert re.search(r"\x1b\[K\S*step 2/4\S*  \S*━{15}╌{15}\S*\r\x1b\[K", shown)
    assert (tmp_path / "logs/rank_0.log").read_text().splitlines()[1:] == ["begin", "end"]


def test_ranks_share_the_cores_by_default(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _, out, _ = Launch(tmp_path, "finish").finish()
    assert f"with {max(1, len(os.sched_getaffinity(0)) // 2)} threads" in out


def test_a_second_launch_appends_to_the_logs(tmp_path):
    for _ in range(2):
        launch = Launch(tmp_path, "finish", nproc=1)
        assert launch.finish()[0] == 0
    assert launch.log(0).count("rank 0 of 1") == 2


def test_a_command_line_need_not_be_utf8(tmp_path):
    assert run_ranks([sys.executable, "-c", "", "\udcff"], 1, tmp_path) == 0
    assert (tmp_path / "rank_0.log").read_text().endswith(" \\udcff\n")


def test_a_rank_that_fails_ends_the_others_and_is_named_with_its_last_lines(tmp_path):
    status, _, err = Launch(tmp_path, "raise").finish()
    assert status == 1
    first, *rest = err.splitlines()
    assert first.startswith("megakernel: error: rank 1 failed with exit status 1; its output is in ")
    assert first.endswith("logs/rank_1.log")
    assert any(line.endswith("RuntimeError: boom in rank 1") for line in rest)


def test_a_folder_in_use_is_reported_once_for_all_ranks(tmp_path):
    status, out, err = Launch(tmp_path, "in use").finish()
    assert (status, err) == (90, "megakernel: error: process 7 writes there\n")
    assert out == "rank 0 of 2 with 1 threads\n"


def test_a_rank_that_is_killed_is_named_with_the_signal(tmp_path):
    status, _, err = Launch(tmp_path, "killed").finish()
    assert status == 1
    assert "rank 1 was ended by SIGKILL, which is also what the kernel sends when memory runs out" in err


def test_ranks_that_outlive_one_that_exited_are_killed(tmp_path):
    status, _, err = Launch(tmp_path, "hang", straggler_seconds=0.5).finish()
    assert status == 1
    assert "rank 1 still runs 0.5 s after rank 0 exited" in err


@pytest.mark.parametrize(
    ("number", "status"),
    tiered(
        [
            (signal.SIGTERM, 143),
            (signal.SIGHUP, 143),
            (signal.SIGINT, 85),
            (signal.SIGUSR1, 85),
            (signal.SIGUSR2, 85),
        ],
        [(signal.SIGTERM, 143), (signal.SIGUSR1, 85)],
    ),
)
def test_signals_are_forwarded_and_the_launcher_exits_with_the_status_of_the_ranks(tmp_path, number, status):
    launch = Launch(tmp_path, "step")
    launch.wait_for_a_step()
    launch.process.send_signal(number)
    assert launch.finish()[::2] == (status, "")


def test_an_interruption_with_nothing_to_save_prints_one_line(tmp_path):
    launch = Launch(tmp_path, "start")
    launch.wait_for_a_step()
    launch.process.send_signal(signal.SIGINT)
    assert launch.finish() == (1, "", "megakernel: error: interrupted\n")


def test_a_killed_launcher_takes_its_ranks_with_it(tmp_path):
    launch = Launch(tmp_path, "step")
    launch.wait_for_a_step()
    launch.process.kill()
    launch.wait_for_death(0)
    launch.wait_for_death(1)
    launch.process.communicate()


VERBOSE_SCRIPT = """
import os, sys
from pathlib import Path
from launch import local
from launch.local import run_ranks
from launch.messages import ignore_write_errors

local._OUTPUT_TIMEOUT = 2.0
ignore_write_errors("stderr")
if sys.argv[2] == "rank":
    ignore_write_errors("stdout")
    print("x" * 200_000)
    print("the last line", file=sys.stderr)
    Path(sys.argv[1], "rank_0.log").write_text("the last line\\n")
else:
    talk = "import sys; print('x' * 200_000, flush=True); print('the last line', file=sys.stderr)"
    sys.exit(run_ranks([sys.executable, "-c", talk], 1, Path(sys.argv[1])))
"""


@pytest.mark.parametrize(
    ("process", "console"),
    tiered(
        [
            ("launcher", "full"),
            ("launcher", "closed"),
            ("launcher", "unread"),
            ("rank", "full"),
            ("rank", "closed"),
        ],
        [("launcher", "unread"), ("rank", "full")],
    ),
)
def test_an_unwritable_console_blocks_no_process_and_the_log_is_complete(tmp_path, process, console):
    command = [sys.executable, "-c", VERBOSE_SCRIPT, str(tmp_path), process]
    if console == "full":
        stdout = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stdout = os.pipe()
    if console == "closed":
        os.close(reader)
    repository = Path(__file__).parents[3]
    assert subprocess.run(command, stdout=stdout, stderr=stdout, cwd=repository, timeout=240).returncode == 0
    assert (tmp_path / "rank_0.log").read_text().endswith("the last line\n")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_ranks_import_no_modules_of_the_working_folder(tmp_path):
    (tmp_path / "queue.py").write_text("raise SystemExit('not the standard library')")
    typed = [sys.executable, "-c", INSTALLED_SCRIPT, "pretrain", trees.file(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(typed, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "data.train=data/x " in line

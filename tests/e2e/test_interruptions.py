"""`megakernel pretrain` when it is killed, asked to stop, or out of disk space."""

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from launch.cli import main
from launch.exit_status import ExitStatus
from tests.distributed.training_run import assert_identical, metrics, scalars, train, write_config
from tests.slurm.submitting import until

STEPS = 24
OPTIONS = (
    f"training.steps={STEPS}",
    "checkpoint.every=3",
    "schedule.name=constant",
    "logging.tensorboard=false",
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, corpus):
    return train(write_config(tmp_path_factory.mktemp("whole"), corpus), 2, *OPTIONS)


class Launched:
    """A running `megakernel pretrain --nproc 2`."""

    def __init__(self, config: Path, *overrides: str, before: Callable[[], None] | None = None):
        command = [sys.executable, "-m", "launch.cli", "pretrain", str(config), *overrides, "--nproc", "2"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # One thread, as in the reference runs, because the order of sums depends on it.
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            preexec_fn=before,
        )

    def wait_for_step(self, step: int) -> "Launched":
        """Wait until it has printed a step."""
        assert self.process.stdout is not None
        next(line for line in self.process.stdout if line.split("/")[0].split() == ["step", str(step)])
        return self

    def wait(self) -> tuple[int, str]:
        """Wait for the end; returns the exit status and the output since the last step waited for."""
        output, _ = self.process.communicate(timeout=120)
        return self.process.returncode, output

    @property
    def ranks(self) -> dict[int, int]:
        """Rank -> process id."""
        launcher = self.process.pid
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        environments = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in children}
        return {
            int(variable[5:]): int(pid)
            for pid, environment in environments.items()
            for variable in environment
            if variable.startswith(b"RANK=")
        }


def descendants(pid: int) -> list[int]:
    """Process ids of all children of `pid` and their descendants."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    child_pids = [int(child) for file in children for child in file.read_text().split()]
    return [*child_pids, *(below for child in child_pids for below in descendants(child))]


def none_runs(processes: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in processes)


@pytest.mark.second
def test_a_run_killed_three_times_resumes_bit_identically_and_leaves_no_process_behind(
    uninterrupted, corpus, tmp_path
):
    config = write_config(tmp_path, corpus)
    steps = sorted(random.Random(3).sample(range(4, STEPS - 3), 3))

    first = Launched(config, *OPTIONS).wait_for_step(steps[0])
    first.process.kill()
    assert first.wait()[0] == -signal.SIGKILL

    for rank, step in ((0, steps[1]), (1, steps[2])):
        run = Launched(config, *OPTIONS, "data.num_workers=1").wait_for_step(step)
        processes = descendants(run.process.pid)
        assert len(processes) >= 4, "two ranks and their data workers"
        os.kill(run.ranks[rank], signal.SIGKILL)
        status, output = run.wait()
        assert status == ExitStatus.FAILED
        assert f"megakernel: error: rank {rank} was ended by SIGKILL" in output
        # Data workers too: those of the killed rank notice that it is gone.
        until(partial(none_runs, processes))

    status, output = Launched(config, *OPTIONS).wait()
    assert status == ExitStatus.DONE
    begin, *lines = output.splitlines()
    assert begin == f"pretrain: starting 2 processes, logs in {tmp_path}/run/logs"
    left = STEPS - (steps[2] - 1) // 3 * 3
    [place] = [place for place, line in enumerate(lines) if line.startswith(f"{tmp_path}/run: ")]
    assert re.search(r" [\d,]+ parameters in float32 on 2 x cpu, data 2$", lines[place])
    assert re.fullmatch(rf"{left} steps, [\d,]+ tokens to go", lines[place + 1])
    end = lines.index("done; next:")
    assert lines[end + 1] == f"  megakernel evaluate {tmp_path}/run"
    assert lines[end + 2].startswith("  megakernel generate ")
    assert_identical(metrics(tmp_path / "run"), uninterrupted)


@pytest.mark.second
def test_every_stop_request_saves_and_the_same_command_resumes(uninterrupted, corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    checkpoints, stop_file = tmp_path / "run/checkpoints", tmp_path / "run/STOP"
    requests = [
        (lambda run: run.process.terminate(), ExitStatus.TERMINATED),
        (lambda run: run.process.send_signal(signal.SIGUSR1), ExitStatus.STOPPED),
        (lambda run: run.process.send_signal(signal.SIGINT), ExitStatus.STOPPED),
        (lambda run: stop_file.touch(), ExitStatus.TERMINATED),
    ]
    done = 0
    for ask, expected in requests:
        run = Launched(config, *OPTIONS, f"checkpoint.every={10 * STEPS}").wait_for_step(done + 2)
        ask(run)
        assert run.wait()[0] == expected
        done = int((checkpoints / "latest").read_text().removeprefix("step_"))
        assert metrics(tmp_path / "run")[-1]["step"] == done < STEPS
    assert not stop_file.exists()

    assert Launched(config, *OPTIONS).wait()[0] == ExitStatus.DONE
    assert_identical(metrics(tmp_path / "run"), uninterrupted)


@pytest.mark.second
def test_a_key_that_was_changed_on_purpose_needs_no_permission_at_later_starts(corpus, tmp_path):
    config, lower = write_config(tmp_path, corpus), "optimizer.lr=1e-4"
    options = (*OPTIONS, "data.num_workers=1", "training.eval_samples=0")
    assert Launched(config, *options, "training.steps=2").wait()[0] == ExitStatus.DONE

    status, output = Launched(config, *options, lower, "training.steps=4").wait()
    assert status == ExitStatus.USAGE
    assert output.count("megakernel: error:") == 1
    assert output.strip().endswith("to change it from here on, add --allow-change optimizer.lr")

    allowed = ("--allow-change", "optimizer.lr")
    status, output = Launched(config, *options, lower, "training.steps=4", *allowed).wait()
    assert status == ExitStatus.DONE
    assert "step 2 had 1.000e-03, and step 3 has 1.000e-04 instead of 1.000e-03" in output
    status, output = Launched(config, *options, lower, "training.steps=6").wait()
    assert status == ExitStatus.DONE
    assert "jumps" not in output
    allowed = ("--allow-change", "schedule")
    decaying = ("schedule.name=wsd", "schedule.decay_steps=4", "schedule.min_lr_ratio=0")
    status, output = Launched(config, *options, lower, "training.steps=10", *decaying, *allowed).wait()
    assert status == ExitStatus.DONE
    assert "jumps" not in output
    decay = [7.5e-5, 5e-5, 2.5e-5, 0]
    rates = scalars(metrics(tmp_path / "run"), "train/lr")
    assert rates == pytest.approx([5e-4, 1e-3, *[1e-4] * 4, *decay])


@pytest.mark.second
def test_signals_to_all_processes_save_and_leave_no_process_behind(corpus, tmp_path):
    # As Slurm and a closed terminal send them: also to the data workers, of which there is one per rank by default.
    config = write_config(tmp_path, corpus)
    options = (*OPTIONS, "training.steps=100000", "checkpoint.every=100000", "data.num_workers=1")
    run = Launched(config, *options).wait_for_step(2)
    processes = descendants(run.process.pid)
    assert len(processes) >= 4, "two ranks and their data workers"
    for number in (signal.SIGHUP, signal.SIGTERM):
        for pid in processes:
            with suppress(ProcessLookupError):  # a data worker that has ended already
                os.kill(pid, number)
    status, output = run.wait()
    assert status == ExitStatus.TERMINATED, output
    done = int((tmp_path / "run/checkpoints/latest").read_text().removeprefix("step_"))
    assert metrics(tmp_path / "run")[-1]["step"] == done
    until(partial(none_runs, processes))


def forbid_large_files() -> None:
    """Limit the size of files, as a disk quota would."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


@pytest.mark.second
def test_a_failed_save_is_a_one_line_error_and_the_run_resumes_once_there_is_space(
    uninterrupted, corpus, tmp_path
):
    config = write_config(tmp_path, corpus)
    train(config, 2, *OPTIONS, "training.steps=4", "training.eval_samples=0")
    checkpoints = tmp_path / "run/checkpoints"
    before = sorted(path.name for path in checkpoints.iterdir())

    status, output = Launched(config, *OPTIONS, before=forbid_large_files).wait()
    assert status == ExitStatus.FAILED
    assert "Traceback" not in output
    assert f"megakernel: error: checkpoint step_6 could not be saved in {checkpoints} (" in output
    assert "Earlier checkpoints are untouched; free space or make the folder writable" in output
    assert sorted(path.name for path in checkpoints.iterdir()) == before

    train(config, 2, *OPTIONS)
    assert scalars(metrics(tmp_path / "run"), "train/loss") == scalars(uninterrupted, "train/loss")


@pytest.mark.second
def test_a_foreground_job_ends_with_the_status_of_its_command(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path, corpus)
    options = ["--cluster", "debug", "--json"]
    assert main(["submit", str(config), "training.steps=1", "training.eval_samples=0", *options]) == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1]
    capsys.readouterr()
    assert main(["submit", "--name", "broken", *options, "--", "evaluate", "nosuch"]) == ExitStatus.FAILED
    for run, state, why in (
        (tmp_path / "run", "COMPLETED", "done"),
        (Path("runs/broken"), "FAILED", "refused its command line or configuration"),
    ):
        capsys.readouterr()
        assert main(["status", str(run), "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
        assert (status["state"], status["nodes"]) == (state, "this machine")
        assert status["why"].startswith(why)


@pytest.mark.second
def test_a_local_job_restarts_an_interrupted_run(uninterrupted, corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    config = write_config(tmp_path, corpus)
    run = tmp_path / "run"
    options = [*OPTIONS, f"checkpoint.every={10 * STEPS}", "--cluster", "local", "-G", "2", "--json"]
    assert main(["submit", str(config), *options]) == 0
    job = json.loads(capsys.readouterr().out)["jobs"][0]
    assert main(["submit", str(config), *options]) == ExitStatus.USAGE
    assert f"has a live job ({job} RUNNING)" in capsys.readouterr().err

    # Poll quickly, as all steps take less than a second.
    until(lambda: (run / "metrics.jsonl").exists() and any(line["step"] >= 1 for line in metrics(run)))
    task = Path(f"/proc/{job}/task/{job}/children").read_text().split()[0]
    os.kill(int(task), signal.SIGUSR2)  # what the job sends itself before the time limit
    assert main(["logs", str(run), "--follow"]) == 0  # returns when the job has ended
    assert "stopped by SIGUSR2 after step" in capsys.readouterr().out
    assert main(["status", str(run), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["why"], status["restarts"]) == ("COMPLETED", "done", 1)
    assert "CUDA_VISIBLE_DEVICES: 4,5\n" in (run / "environment.txt").read_text()
    assert scalars(metrics(run), "train/loss") == scalars(uninterrupted, "train/loss")

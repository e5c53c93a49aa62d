"""The messages of a real job of two nodes: one for each event, whatever the number of ranks."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.messages import webhook
from tests.slurm.submitting import kill, megakernel, status, story, submit, until, until_state, until_step


@pytest.mark.second
@pytest.mark.timeout(900)
def test_a_killed_rank_a_preemption_and_the_end_are_told_once_each(place, monkeypatch):
    with webhook() as hook:
        monkeypatch.setenv("TEAM_HOOK", hook.url)
        Path("told.yaml").write_text("preflight_mib: 0\nnotify: {webhook: TEAM_HOOK}\n")
        words = "run.yaml --name told -N 2 --env SLURM_WAIT=5 training.steps=300"
        (job,) = submit(words, "--cluster told.yaml")
        until_step("told", 15)
        kill(job, 1, signal.SIGKILL)
        until(lambda: story("told", job)[-1] == "requeued")
        until(lambda: hook.events() == ["restart"], seconds=30)
        first = hook.received[0]
        assert (first["run"], first["job"], first["restart"], first["steps"]) == ("told", job, 0, 300)
        assert "(rank 1 on n2: Killed); the job restarts after step 10" in first["reason"]
        assert first["step"] >= 15
        assert first["loss"] > 0
        assert (Path(first["log"]) / "rank_1.err").exists()

        until(lambda: story("told", job)[-1] == "started")
        until_step("told", 40)
        # As before a time limit.
        subprocess.run(["scancel", "--signal=USR2", job], check=True)
        until(lambda: story("told", job)[-1] == "requeued")
        assert until_state("told", "COMPLETED", "FAILED")["state"] == "COMPLETED"
        until(lambda: len(hook.received) == 3, seconds=30)
        assert hook.events() == ["restart", "preemption", "end"]
        assert [one["restart"] for one in hook.received] == [0, 1, 2]
        assert "saved and stopped to make room; the job restarts after step" in hook.received[1]["reason"]
        assert (hook.received[2]["step"], hook.received[2]["reason"]) == (300, "done")
        hidden = [path for path in Path("runs/told").rglob("*") if path.is_file()]
        shown = [str(path) for path in hidden if b"t0psecret" in path.read_bytes()]
        assert [Path(path).name for path in shown] == ["environment"]


@pytest.mark.second
@pytest.mark.timeout(600)
def test_a_server_that_refuses_leaves_one_line_in_the_log_and_the_job_goes_on(place, monkeypatch):
    with webhook() as hook:
        hook.status = 500
        monkeypatch.setenv("TEAM_HOOK", hook.url)
        Path("deaf.yaml").write_text("preflight_mib: 0\nnotify: {webhook: TEAM_HOOK}\n")
        submit("run.yaml --name deaf training.steps=4 --cluster deaf.yaml")
        assert until_state("deaf", "COMPLETED", "FAILED")["state"] == "COMPLETED"
        assert (status("deaf")["why"], hook.events()) == ("done", ["end"])
        said = megakernel("logs deaf --rank batch --grep notify").out
        assert said.count("the server answers 500") == len(said.splitlines()) == 1

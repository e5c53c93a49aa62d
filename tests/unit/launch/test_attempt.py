"""What a batch script decides when its processes were ended by TERM; tests/slurm has it from a real Slurm."""

import os

import pytest

from launch.run_status import _why
from launch.slurm.attempt import Attempt
from launch.slurm.job_folder import JobFolder
from launch.slurm.states import JobState
from megakernel.training import events


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """An attempt whose job Slurm ends; `when` is what it says about preemption."""

    def make(when, *earlier):
        program = tmp_path / "scontrol"
        program.write_text(f"#!/bin/sh\necho 'JobId=7 JobState=COMPLETING' 'PreemptTime={when}'\n")
        program.chmod(0o700)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setenv(events.JOB_VARIABLE, "7")
        one = object.__new__(Attempt)
        one.run, one.job = JobFolder(tmp_path), "7"
        for event in earlier:
            events.record(tmp_path, event)
        return one

    return make


@pytest.mark.parametrize(
    ("when", "earlier", "preempted"),
    [
        ("2026-11-28T06:37:14", ["started"], True),
        ("None", ["started"], False),
        ("2026-11-28T06:37:14", ["started", "cancelled"], False),  # the user asked too
        ("2026-11-28T06:37:14", ["started", "cancelled", "ended", "started"], True),
    ],
)
def test_a_job_is_preempted_if_slurm_has_a_time_for_it_and_no_user_cancelled_it(
    when, earlier, preempted, attempt
):
    assert attempt(when, *earlier)._is_preempted() is preempted


def test_without_an_answer_of_slurm_the_job_counts_as_cancelled(attempt, tmp_path):
    one = attempt("x", "started")
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    assert one._is_preempted() is False


def test_a_preempted_job_that_was_not_requeued_says_how_to_go_on(tmp_path):
    """As of jobs of earlier versions, and where saving takes longer than Slurm waits."""
    ended = {"event": "ended", "why": "ended on request"}
    why = _why(JobFolder(tmp_path), JobState("7", "PREEMPTED"), [ended])
    assert "was not requeued; `megakernel resume` continues the run" in why
    assert _why(JobFolder(tmp_path), JobState("7", "CANCELLED"), [ended]) == "ended on request"

"""States of jobs that Slurm no longer knows, from the events of the run."""

import json
import os

import pytest

from launch.arguments import NotFound
from launch.slurm import states
from launch.slurm.job_folder import Job, JobFolder, find_runs
from launch.slurm.states import JobState, job_states, resolve_dependency
from megakernel.config import UserError
from megakernel.training import events


def run_with_events(folder, *recorded):
    """A run with these events, of a job on this machine that has ended."""
    run = JobFolder(folder / "run")
    run.path.mkdir()
    run.add([Job("999999999", "local", "now", "2026-11-22T00:00:00+00:00")])
    for name, facts in recorded:
        events.record(run.path, name, env={events.JOB_VARIABLE: "999999999"}, **facts)
    return run


@pytest.mark.parametrize(
    ("recorded", "state"),
    [
        ([], "FAILED"),
        ([("started", {})], "FAILED"),  # it ended without an event
        ([("started", {}), ("ended", {"status": 0})], "COMPLETED"),
        ([("started", {}), ("ended", {"status": 1})], "FAILED"),
        ([("started", {}), ("ended", {"status": 85}), ("requeued", {}), ("started", {})], "FAILED"),
        ([("cancelled", {})], "CANCELLED"),
        ([("started", {}), ("cancelled", {}), ("ended", {"status": 143})], "CANCELLED"),
    ],
)
def test_the_last_event_of_a_job_gives_its_state(recorded, state, tmp_path):
    (found,) = job_states(run_with_events(tmp_path, *recorded), {}).values()
    assert found.state == state
    assert not found.is_live


def test_a_truncated_line_is_skipped_and_the_next_one_read(tmp_path):
    run = run_with_events(tmp_path, ("started", {}))
    with (run.path / events.FILE).open("a") as file:
        file.write('{"time": "2026-11-26T00:00:00", "event": "sav')  # as a full disk leaves it
    events.record(run.path, "ended", env={}, status=0, why='no {"time": in it')
    assert [event["event"] for event in events.read(run.path)] == ["started", "ended"]


def test_events_record_their_job_and_restart(tmp_path):
    events.record(
        tmp_path, "saved", env={events.JOB_VARIABLE: "7_1", events.RESTART_VARIABLE: "2"}, step=5, why=None
    )
    (line,) = (tmp_path / events.FILE).read_text().splitlines()
    event = json.loads(line)
    assert {name: event[name] for name in event if name != "time"} == {
        "event": "saved",
        "job": "7_1",
        "restart": 2,
        "step": 5,
    }


def test_a_run_is_found_by_its_folder_name_or_job_id(tmp_path):
    run = run_with_events(tmp_path)
    for text in (str(run.path), "run", "999999999"):
        assert [found.path for found in find_runs([text], tmp_path)] == [run.path]
    with pytest.raises(NotFound, match="submitted runs: run"):
        find_runs(["other"], tmp_path)
    assert os.listdir(run.path) == ["run.json"]


def test_accounting_is_asked_for_any_number_of_jobs(tmp_path, monkeypatch):
    for name, output in (("squeue", ""), ("sacct", "10000000_0|COMPLETED\n10012999_0|FAILED\n")):
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '{output}'\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    run = JobFolder(tmp_path / "run")
    run.path.mkdir()
    run.add([Job(f"{10_000_000 + number}_0", "slurm", "now", "") for number in range(13_000)])
    found = states.query_slurm([run])
    assert {job: state.state for job, state in found.items()} == {
        "10000000_0": "COMPLETED",
        "10012999_0": "FAILED",
    }


def test_names_in_a_dependency_become_the_jobs_that_are_still_awaited(tmp_path, monkeypatch):
    for name, job, status in (("done", "1", 0), ("failed", "2", 1), ("live", "3", None)):
        (tmp_path / name).mkdir()
        JobFolder(tmp_path / name).add([Job(job, "slurm", "now", "")])
        if status is not None:
            events.record(tmp_path / name, "ended", env={events.JOB_VARIABLE: job}, status=status)
    monkeypatch.setattr(states, "query_slurm", lambda runs: {"3": JobState("3", "RUNNING")})

    def resolved(dependency):
        return resolve_dependency(dependency, tmp_path)

    assert resolved("afterok:done,afterok:live:17,singleton") == "afterok:3:17,singleton"
    assert resolved("afterok:done") == ""
    # One of the conditions separated by `?` suffices.
    assert resolved("afterok:live?afterok:done") == ""
    assert resolved("afterok:failed?afterok:live?afterany:17") == "afterok:3?afterany:17"
    for dependency in ("afterok:live,afterok:failed", "afterok:failed?afternotok:done"):
        with pytest.raises(UserError, match="failed has ended"):
            resolved(dependency)
    with pytest.raises(NotFound, match="nosuch is no submitted run"):
        resolved("afterok:nosuch?afterok:done")


def test_a_pattern_or_array_id_finds_several_runs(tmp_path):
    for index in (0, 1, 2, 10):
        (tmp_path / f"lr-{index}").mkdir()
        JobFolder(tmp_path / f"lr-{index}").add([Job(f"17_{index}", "slurm", "now", "")])
    for name, id in (("lr", "18"), ("wd-7", "19")):
        (tmp_path / name).mkdir()
        JobFolder(tmp_path / name).add([Job(id, "slurm", "now", "")])

    def names(*texts):
        return [run.name for run in find_runs(texts, tmp_path)]

    members = ["lr-0", "lr-1", "lr-2", "lr-10"]
    assert names("17") == names("lr-*") == members
    assert names("17_1") == ["lr-1"]
    assert names("17_1*") == ["lr-1", "lr-10"]
    assert names("lr") == ["lr"], "a run with exactly this name has priority"
    (tmp_path / "lr/run.json").unlink()
    assert names("lr") == names(str(tmp_path / "lr")) == members
    assert names("wd-7", "lr-1", "wd-*") == ["wd-7", "lr-1"]
    for text in ("wd", "17_[10-11]", "x*"):
        with pytest.raises(NotFound, match="is no submitted run"):
            names(text)

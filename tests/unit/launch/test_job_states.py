"""What a run's own record says of jobs that no program of Slurm knows any more."""

import json
import os

import pytest

from launch.arguments import NotFound
from launch.slurm.job_folder import Job, JobFolder, find_runs
from launch.slurm.states import job_states
from megakernel.training import events


def run_with(folder, *happened):
    """A run of a job of this machine that no longer runs, and its events."""
    run = JobFolder(folder / "run")
    run.path.mkdir()
    run.add([Job("999999999", "local", "now", "2026-11-22T00:00:00+00:00")])
    for name, facts in happened:
        events.record(run.path, name, env={events.JOB_VARIABLE: "999999999"}, **facts)
    return run


@pytest.mark.parametrize(
    ("happened", "state"),
    [
        ([], "FAILED"),
        ([("started", {})], "FAILED"),  # it ended without a word
        ([("started", {}), ("ended", {"status": 0})], "COMPLETED"),
        ([("started", {}), ("ended", {"status": 1})], "FAILED"),
        ([("started", {}), ("ended", {"status": 85}), ("requeued", {}), ("started", {})], "FAILED"),
        ([("cancelled", {})], "CANCELLED"),
        ([("started", {}), ("cancelled", {}), ("ended", {"status": 143})], "CANCELLED"),
    ],
)
def test_the_last_event_of_a_job_is_its_state(happened, state, tmp_path):
    (found,) = job_states(run_with(tmp_path, *happened)).values()
    assert found.state == state
    assert not found.is_live


def test_a_line_cut_short_is_left_out_and_the_next_one_read(tmp_path):
    run = run_with(tmp_path, ("started", {}))
    with (run.path / events.FILE).open("a") as file:
        file.write('{"time": "2026-11-26T00:00:00", "event": "sav')  # as a full disk leaves it
    events.record(run.path, "ended", env={}, status=0, why='no {"time": in it')
    assert [event["event"] for event in events.read(run.path)] == ["started", "ended"]


def test_events_carry_the_job_they_happened_in(tmp_path):
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


def test_a_run_is_found_by_folder_name_and_job(tmp_path):
    run = run_with(tmp_path)
    for text in (str(run.path), "run", "999999999"):
        assert [found.path for found in find_runs([text], tmp_path)] == [run.path]
    with pytest.raises(NotFound, match="submitted runs: run"):
        find_runs(["other"], tmp_path)
    assert os.listdir(run.path) == ["run.json"]


def test_several_runs_and_an_arrays_members_are_found_by_one_word(tmp_path):
    for at in (0, 1, 2, 10):
        (tmp_path / f"lr-{at}").mkdir()
        JobFolder(tmp_path / f"lr-{at}").add([Job(f"17_{at}", "slurm", "now", "")])
    for name, id in (("lr", "18"), ("wd-7", "19")):
        (tmp_path / name).mkdir()
        JobFolder(tmp_path / name).add([Job(id, "slurm", "now", "")])

    def names(*texts):
        return [run.name for run in find_runs(texts, tmp_path)]

    members = ["lr-0", "lr-1", "lr-2", "lr-10"]
    assert names("17") == names("lr-*") == members
    assert names("17_1") == ["lr-1"]
    assert names("17_1*") == ["lr-1", "lr-10"]
    assert names("lr") == ["lr"], "a run of that very name comes first"
    (tmp_path / "lr/run.json").unlink()
    assert names("lr") == names(str(tmp_path / "lr")) == members
    assert names("wd-7", "lr-1", "wd-*") == ["wd-7", "lr-1"]
    for text in ("wd", "17_[10-11]", "x*"):
        with pytest.raises(NotFound, match="is no submitted run"):
            names(text)

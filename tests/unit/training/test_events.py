"""Events of a run that thousands of processes would tell at once."""

from megakernel.training import events, process


def fail(run):
    for rank in range(3):
        process._record_failure(run, rank, "connection reset by peer")


def test_of_one_cause_the_first_process_of_each_start_of_a_job_tells(tmp_path, monkeypatch):
    monkeypatch.setenv(events.JOB_VARIABLE, "7")
    for restart in "01":
        (tmp_path / "logs" / "7" / restart).mkdir(parents=True)
        monkeypatch.setenv(events.RESTART_VARIABLE, restart)
        fail(tmp_path)
    assert [(one["restart"], one["rank"]) for one in events.read(tmp_path)] == [(0, 0), (1, 0)]


def test_where_no_logs_can_say_who_was_first_every_process_tells(tmp_path, monkeypatch):
    monkeypatch.delenv(events.JOB_VARIABLE, raising=False)
    fail(tmp_path)
    monkeypatch.setenv(events.JOB_VARIABLE, "7")
    fail(tmp_path)
    assert len(events.read(tmp_path)) == 6

"""Failure events, which thousands of processes would record at once."""

from megakernel.training import events, process


def record_failures(run):
    for rank in range(3):
        process._record_failure(run, rank, "connection reset by peer")


def test_only_the_first_failing_process_of_each_start_records_the_failure(tmp_path, monkeypatch):
    monkeypatch.setenv(events.JOB_VARIABLE, "7")
    for restart in "01":
        (tmp_path / "logs" / "7" / restart).mkdir(parents=True)
        monkeypatch.setenv(events.RESTART_VARIABLE, restart)
        record_failures(tmp_path)
    assert [(event["restart"], event["rank"]) for event in events.read(tmp_path)] == [(0, 0), (1, 0)]


def test_every_process_records_its_failure_if_there_is_no_log_folder(tmp_path, monkeypatch):
    monkeypatch.delenv(events.JOB_VARIABLE, raising=False)
    record_failures(tmp_path)
    monkeypatch.setenv(events.JOB_VARIABLE, "7")
    record_failures(tmp_path)
    assert len(events.read(tmp_path)) == 6

import signal

import pytest

from launch import local
from launch.exit_status import ExitStatus
from launch.slurm import attempt
from launch.slurm.restarting import Start, decide
from launch.slurm_programs import SlurmRefused
from megakernel.training import events

RESET = "rank 3 on n2: RuntimeError: [gloo/transport/tcp/pair.cc:538] Read error [10.0.0.2]:5: Connection reset by peer"


def ends(*statuses, progressed=False):
    return [Start(status, progressed) for status in statuses]


@pytest.mark.parametrize(
    ("status", "restarts"),
    [
        (ExitStatus.DONE, False),
        (ExitStatus.FAILED, False),
        (ExitStatus.USAGE, False),
        (ExitStatus.TERMINATED, False),  # scancel: a job that came back could not be cancelled
        (ExitStatus.STOPPED, True),
        (ExitStatus.STALLED, True),
        (ExitStatus.UNFIT, True),
        (ExitStatus.OUT_OF_MEMORY, True),
        (ExitStatus.IN_USE, True),
        (ExitStatus.NOT_FINITE, False),
        (ExitStatus.NOT_PREPARED, False),
        (137, True),  # KILL
        (140, True),  # USR2, before the process had its signal handlers
    ],
)
def test_only_causes_outside_the_run_restart_it(status, restarts):
    assert decide(ends(status), max_restarts=3).restart is restarts


@pytest.mark.parametrize(
    "error",
    [
        RESET,
        "Node failure on n2",
        "rank 0 on n1: DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2, NCCL remote error",
        "rank 0 on n1: RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "rank 0 on n1: OSError: [Errno 116] Stale file handle: 'data/x.bin'",
        "rank 0 on n1: RuntimeError: Watchdog caught collective operation timeout: NCCL ran for 600000 ms, timeout",
    ],
)
def test_cluster_errors_restart_a_run_that_has_not_saved_a_step(error):
    assert decide(ends(ExitStatus.FAILED), 3, error).restart
    assert not decide(ends(ExitStatus.FAILED), 3, "rank 0 on n1: KeyError: 'x'").restart


def test_an_error_restarts_a_run_only_after_progress():
    error = "rank 0 on n1: KeyError: 'x'"
    assert decide([Start(ExitStatus.FAILED, True)], 3, error).restart
    assert not decide([Start(ExitStatus.FAILED, True), Start(ExitStatus.FAILED, False)], 3, error).restart


def test_user_errors_and_cancellation_never_restart_a_run():
    for status in (ExitStatus.USAGE, ExitStatus.NOT_FINITE, ExitStatus.NOT_PREPARED, ExitStatus.TERMINATED):
        assert not decide([Start(status, True)], 3, RESET).restart


def test_preemptions_do_not_count_as_restarts():
    assert decide(ends(*[ExitStatus.STOPPED] * 100), max_restarts=1).restart
    between = ends(*[ExitStatus.STALLED, ExitStatus.STOPPED] * 2)
    assert decide(between, 2).restart
    assert not decide([*between, Start(ExitStatus.STALLED, False)], 2).restart


def test_progress_resets_the_count_of_restarts():
    lost = ends(*[ExitStatus.FAILED] * 3)
    assert decide(lost, 3, RESET).restart
    assert not decide([*lost, *ends(ExitStatus.FAILED)], 3, RESET).restart
    weeks = [Start(ExitStatus.STALLED, True)] * 100
    assert decide(weeks, 3).restart
    assert decide([*weeks, *lost], 3, RESET).restart


@pytest.mark.parametrize("status", [ExitStatus.OUT_OF_MEMORY, 137])
def test_out_of_memory_restarts_at_most_twice(status):
    assert decide(ends(*[status] * 2), 9).restart
    decision = decide(ends(*[status] * 3), 9)
    assert not decision.restart
    assert "2 restarts in a row saved no step" in decision.why


def test_further_exit_statuses_can_be_configured_to_restart():
    assert not decide(ends(42), 3).restart
    assert decide(ends(42), 3, restart_on=[42]).restart


def test_the_reason_says_that_requeuing_is_off():
    assert "requeuing is off" in decide(ends(ExitStatus.STOPPED), 0).why


def test_the_reason_includes_the_error_of_a_failed_process():
    error = "rank 3 on n2: ValueError: no"
    assert decide(ends(ExitStatus.FAILED), 9, error).why == f"failed ({error})"
    assert decide(ends(ExitStatus.STOPPED), 9, error).why == "saved and stopped to make room"


def test_each_start_of_a_local_job_has_its_time_limit_to_save_and_end():
    received = []

    def never_end():
        while True:
            signal.pause()

    with local.handle_signals([signal.SIGUSR2], received.append):
        with attempt._time_limit(60.0, 0.1):
            pass
        for _ in range(2):
            with pytest.raises(TimeoutError, match="time limit"), attempt._time_limit(0.02 / 60, 0.01):
                never_end()
        assert received == [signal.SIGUSR2] * 2
        with (
            pytest.raises(TimeoutError),
            attempt._time_limit(0.02 / 60, 0.05),
        ):  # shorter than the time to save
            never_end()
    assert len(received) == 2


@pytest.mark.parametrize(("refusals", "event"), [(3, "requeued"), (1000, "not requeued")])
def test_requeuing_retries_while_the_controller_restarts(refusals, event, tmp_path, monkeypatch):
    commands = []

    def check_output(*command):
        commands.append(command)
        if len(commands) <= refusals:
            raise SlurmRefused("Unable to contact slurm controller")

    monkeypatch.setattr(attempt, "check_output", check_output)
    monkeypatch.setattr(attempt.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    attempt.requeue(tmp_path, "7", excluded=["n1"])
    assert [one["event"] for one in events.read(tmp_path)] == [event]
    if event == "requeued":
        assert commands[refusals:] == [
            ("scontrol", "requeuehold", "7"),
            ("scontrol", "update", "JobId=7", "ExcNodeList=n1"),
            ("scontrol", "release", "7"),
        ]

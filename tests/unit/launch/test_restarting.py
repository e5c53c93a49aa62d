import pytest

from launch.exit_status import ExitStatus
from launch.slurm.restarting import decide


@pytest.mark.parametrize(
    ("status", "again"),
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
        (137, True),  # KILL
        (140, True),  # USR2, before the process could listen to it
    ],
)
def test_what_befell_a_sound_run_starts_again_and_nothing_else(status, again):
    assert decide(status, restarts=0, max_restarts=3, saved=[10]).restart is again


@pytest.mark.parametrize(
    ("restarts", "allowed", "saved", "why"),
    [
        (0, 0, [10], "not to be requeued"),
        (3, 3, [10, 20, 30, 40], "restarted 3 times"),
        (2, 9, [10, 10, 10], "2 restarts in a row saved nothing beyond step 10"),
        (4, 9, [10, 20, 30, 30, 30], "beyond step 30"),
    ],
)
def test_a_restart_that_is_not_due_says_why(restarts, allowed, saved, why):
    decision = decide(ExitStatus.STOPPED, restarts, allowed, saved)
    assert not decision.restart
    assert why in decision.why


@pytest.mark.parametrize("saved", [[0, 0], [10, 10, 20], [10, 10, 20, 20]])
def test_one_start_without_progress_is_no_reason_to_give_up(saved):
    assert decide(ExitStatus.STALLED, restarts=len(saved) - 1, max_restarts=9, saved=saved).restart


def test_what_a_process_said_is_told_where_it_failed():
    said = "rank 3 on n2: ValueError: no"
    assert decide(ExitStatus.FAILED, 0, 9, [0], said).why == f"failed ({said})"
    assert decide(ExitStatus.STOPPED, 0, 9, [0], said).why == "saved and stopped to make room"

"""Messages of srun (Slurm 22.05.8) about steps of four processes on two nodes."""

import pytest

from launch.slurm.restarting import TaskEnds, task_ends

SAVED = "srun: error: n1: task 0: Exited with exit code 85\nsrun: error: n2: tasks 2-3: Exited with exit code 85\n"
KILLED = """\
srun: error: n2: task 2: Killed
srun: error: n1: task 1: Exited with exit code 1
srun: error: n2: task 3: Exited with exit code 1
"""
STALLED = """\
srun: error: n1: task 1: Exited with exit code 1
srun: error: n1: task 0: Exited with exit code 86
srun: First task exited 5s ago
srun: StepId=1.1 tasks 2-3: running
srun: launch/slurm: _step_signal: Terminating StepId=1.1
srun: Job step aborted: Waiting up to 12 seconds for job step to finish.
srun: error: n2: tasks 2-3: Killed
"""
FAILED = STALLED.replace("86", "1")
USR2 = (
    "srun: error: n2: tasks 2-3: User defined signal 2\nsrun: error: n1: tasks 0-1: User defined signal 2\n"
)
REFUSED = "srun: error: Unable to create step for job 2: Invalid generic resource (gres) specification\n"
CRASHED = "srun: error: n1: task 0: Segmentation fault (core dumped)\nsrun: First task exited 60s ago\n"
# From a cluster that confines jobs to control groups, and from one with JobAcctGatherParams=OverMemoryKill.
OUT_OF_MEMORY = "srun: error: n2: task 1: Out Of Memory\n"
OVER_LIMIT = """\
srun: Job step aborted: Waiting up to 12 seconds for job step to finish.
srun: error: n1: task 0: Killed
srun: error: n2: task 1: Killed
"""


@pytest.mark.parametrize(
    ("stderr", "status", "expected"),
    [
        ("", 0, TaskEnds(0, None)),
        (
            "srun: error: task 0 launch failed: Slurmd could not connect IO\n",
            0,
            TaskEnds(1, "task 0 launch failed: Slurmd could not connect IO"),
        ),
        ("srun: error: Node failure on n2\n", 0, TaskEnds(1, "Node failure on n2")),
        (REFUSED, 1, TaskEnds(1, REFUSED.removeprefix("srun: error: ").strip())),
        (SAVED, 85, TaskEnds(85, None)),
        (KILLED, 137, TaskEnds(137, "rank 2 on n2: Killed")),
        (STALLED, 137, TaskEnds(86, None)),
        (FAILED, 137, TaskEnds(1, None)),
        (USR2, 140, TaskEnds(140, "rank 2-3 on n2: User defined signal 2")),
        (OUT_OF_MEMORY, 1, TaskEnds(88, "rank 1 on n2: Out Of Memory")),
        (CRASHED, 139, TaskEnds(139, "rank 0 on n1: Segmentation fault (core dumped)")),
    ],
)
def test_a_process_that_srun_ended_is_not_the_cause(stderr, status, expected):
    assert task_ends(stderr, status) == expected


def test_exceeded_memory_is_read_from_the_logs_of_the_processes():
    killed = "slurmstepd-n2: error: StepId=1.0 exceeded memory limit (328478720 > 209715200), being killed\n"
    assert task_ends(OVER_LIMIT, 137, killed) == TaskEnds(88, "n2: 313 MiB of 200 MiB")
    assert task_ends(OVER_LIMIT, 137) == TaskEnds(137, "rank 0 on n1: Killed"), (
        "as if killed by anything else"
    )

import pytest

from launch.environment import launched_process
from megakernel.config import UserError
from megakernel.parallel.processes import ProcessEnvironment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "1234",
}
# The environment of one task of `srun --nodes 2 --ntasks-per-node 2`.
SRUN = {
    "SLURM_JOB_ID": "4321",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_a_process_started_without_a_launcher_joins_no_group():
    assert launched_process({}) is None


def test_ranks_are_read_from_the_variables_of_torchrun():
    assert launched_process(TORCHRUN) == ProcessEnvironment(5, 8, 1, 4, "node7", 1234)


def test_a_rank_reads_the_variables_that_its_launcher_set():
    process = ProcessEnvironment(2, 3, 2, 3, "here", 99)
    assert launched_process(process.variables()) == process


def test_an_incomplete_set_of_torchrun_variables_is_refused():
    with pytest.raises(UserError, match="MASTER_ADDR is not"):
        launched_process({key: value for key, value in TORCHRUN.items() if key != "MASTER_ADDR"})


def test_ranks_are_read_from_the_variables_of_srun():
    process = launched_process({**SRUN, "MASTER_ADDR": "10.0.0.1"})
    assert process is not None
    assert (process.rank, process.world_size, process.local_rank, process.local_world_size) == (3, 4, 1, 2)
    assert process.master_address == "10.0.0.1"


def test_tasks_of_one_step_share_a_port_and_other_steps_use_another():
    one_node = {**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}
    ports = [
        process.master_port
        for changes in ({}, {"SLURM_PROCID": "0"}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "4322"})
        if (process := launched_process({**one_node, **changes})) is not None
        and process.master_address == "127.0.0.1"
    ]
    assert len(ports) == 4
    assert ports[0] == ports[1]
    assert len(set(ports)) == 3
    assert all(1024 < port < 32768 for port in ports)  # above the privileged, below the ephemeral


@pytest.mark.parametrize(
    ("counts", "expected"), [("4", [4]), ("2(x3)", [2, 2, 2]), ("2(x2),1", [2, 2, 1]), ("3,1(x2)", [3, 1, 1])]
)
def test_slurms_task_counts_are_read_per_node(counts, expected):
    environments = [
        launched_process(
            {**SRUN, "MASTER_ADDR": "n1", "SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": str(node)}
        )
        for node in range(len(expected))
    ]
    assert [process.local_world_size for process in environments if process is not None] == expected


def test_a_batch_script_starts_its_own_processes():
    batch = {key: value for key, value in SRUN.items() if "STEP" not in key}
    assert launched_process({**batch, "SLURM_PROCID": "0"}) is None


def test_an_interactive_shell_of_one_task_starts_its_own_processes():
    assert launched_process({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_a_node_that_slurm_cannot_resolve_is_refused_with_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # a machine without scontrol
    with pytest.raises(UserError, match="export MASTER_ADDR"):
        launched_process(SRUN)

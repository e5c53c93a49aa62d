from pathlib import Path

import pytest

from megakernel.config import ConfigError
from megakernel.config.cluster import Cluster, load_cluster, slurm_minutes

SHIPPED = sorted((Path(__file__).parents[3] / "configs" / "cluster").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_cluster_file_loads(path):
    assert load_cluster(path, {}).world_size >= 1


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("90:30", 90.5),
        ("1:30:00", 90),
        ("2-0", 2880),
        ("2-1:30", 2970),
        ("2-1:30:30", 2970.5),
        ("1x", None),
        ("1:2:3:4", None),
        ("-5", None),
    ],
)
def test_time_limits_are_parsed_as_by_slurm(text, minutes):
    assert slurm_minutes(text) == minutes


def test_options_override_the_file_and_variables_are_substituted(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "nodes: 4\naccount: ${PROJECT}\nenvironment: {NCCL_DEBUG: INFO, NCCL_IB_HCA: mlx5}\n"
        "setup: ['source ${HOME}/setup']\n"
    )
    cluster = load_cluster(file, {"nodes": "2", "environment": {"NCCL_DEBUG": "WARN"}}, {"PROJECT": "p1"})
    assert (cluster.nodes, cluster.account) == (2, "p1")
    assert cluster.environment == {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5"}
    assert cluster.setup == ["source ${HOME}/setup"], "setup commands are left to the shell of the job"


def test_all_problems_are_reported_at_once(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("gpu_per_node: 8\nnodes: 0\n")
    with pytest.raises(ConfigError) as caught:
        load_cluster(file, {})
    text = str(caught.value)
    assert "gpu_per_node=8 is an unknown key; did you mean gpus_per_node?" in text
    assert "nodes=0 should be greater than or equal to 1" in text


def test_sbatch_options_that_have_their_own_key_are_refused(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("sbatch: {gpus-per-node: 4, signal: null, exclusive: true, ntasks-per-node: 2}\n")
    with pytest.raises(ConfigError) as caught:
        load_cluster(file, {})
    assert str(caught.value) == "sbatch.gpus-per-node=4 has an option of its own; give --gpus-per-node"


def test_there_is_one_task_per_gpu_by_default():
    assert Cluster(nodes=2, gpus_per_node=8).world_size == 16
    assert Cluster(nodes=2, gpus_per_node=0).world_size == 2
    assert Cluster(nodes=2, sbatch={"ntasks-per-node": 3}).world_size == 6


@pytest.mark.parametrize(
    ("file", "option", "counts"),
    [
        ("nodes: 2-4", {}, [2, 3, 4]),
        ("nodes: 3-3", {}, [3]),
        ("nodes: 2-4", {"nodes": "8"}, [8]),  # an option means what it says
        ("nodes: 2-4", {"nodes": "1-2"}, [1, 2]),
        ("nodes: 4", {"nodes": "1-2"}, [1, 2]),
        ("nodes: 4,8,16", {}, [4, 8, 16]),
        ("nodes: '16, 1-2,2'", {}, [1, 2, 16]),
        ("{nodes: 3, fewer_nodes: [2]}", {}, [2, 3]),  # as a submission records it
        ("{nodes: 3, fewer_nodes: [2]}", {"nodes": "3"}, [3]),
    ],
)
def test_a_range_of_nodes_is_least_and_most_and_an_option_replaces_both(file, option, counts, tmp_path):
    (tmp_path / "mine.yaml").write_text(file)
    changes = {"fewer_nodes": [], **option} if option else {}
    cluster = load_cluster(tmp_path / "mine.yaml", changes)
    assert list(cluster.node_counts) == counts
    asked = str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
    assert cluster.requested_nodes == asked
    assert cluster.node_range == {16: "4,8,16" if counts[0] == 4 else "1-2,16"}.get(counts[-1], asked)
    assert cluster.world_size == counts[-1], "at most"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nodes: 4-2", "nodes=4-2 should be a valid integer"),
        ("nodes: 4,2-1", "nodes=4,2-1 should be a valid integer"),
        ("{nodes: 4, fewer_nodes: [4]}", "fewer_nodes=[4] has a number that is not from 1 to nodes - 1 = 3"),
        ("nodes: 0-2", "nodes=0-2 should be greater than or equal to 1"),
        ("nodes: 2-", "nodes=2- should be a valid integer"),
        ("{nodes: 1-2, spares: 1}", "spares=1 is beside nodes=1-2, which goes on with fewer nodes by itself"),
        ("{nodes: 1-2, executor: local}", "nodes=2 exceeds the one machine of executor=local"),
    ],
)
def test_a_wrong_range_of_nodes_is_refused_in_one_line(text, reason, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_cluster(tmp_path / "mine.yaml", {})
    assert str(caught.value).splitlines()[0].startswith(reason)

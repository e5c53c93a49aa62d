"""A job whose processes start from the nodes' own disks (`stage` in the cluster's file)."""

import sys
from pathlib import Path

import pytest

from tests.slurm.submitting import losses, megakernel, submit, until, until_state

pytestmark = pytest.mark.second


def run_staged(name: str, folder: str) -> str:
    """Train on two nodes with two processes each; returns the batch log and those of the ranks."""
    Path(f"{name}.yaml").write_text(
        f"gpus_per_node: 0\npreflight_mib: 0\nsbatch: {{ntasks-per-node: 2}}\nstage: {folder}\n"
    )
    submit(f"run.yaml --name {name} -N 2 training.steps=3 --cluster {name}.yaml")
    done = until_state(name, "COMPLETED", "FAILED", seconds=800)  # it copies 100,000 files to each node
    log = megakernel(f"logs {name} --rank all").out + megakernel(f"logs {name} --rank batch").out
    assert (done["state"], list(losses(name))) == ("COMPLETED", [1, 2, 3]), log
    assert "4 x cpu, data 4" in log
    return log


def executables(name: str) -> str:
    """The line of environment.txt that names rank 0's Python."""
    text = Path("runs", name, "environment.txt").read_text()
    return next(line for line in text.splitlines() if line.startswith("command: "))


def test_processes_start_from_their_nodes_disk_which_is_cleared_at_the_end(place, tmp_path):
    # Both nodes are this machine: a disk of each is a folder of its name.
    log = run_staged("staged", f"{tmp_path}/disk-$SLURMD_NODENAME")
    assert "== staged on 2 nodes" in log
    assert f"{tmp_path}/disk-n1/megakernel-" in executables("staged")
    assert "/environment/bin/python" in executables("staged")
    until(lambda: not [*tmp_path.glob("disk-*/megakernel-*/complete")], seconds=100)
    archives = sorted(path.name.partition("-")[0] for path in Path(sys.prefix, ".stage").glob("*.tar"))
    assert archives in (["environment"], ["base", "environment"]), "one of each, for all jobs"


def test_a_node_without_room_reads_the_shared_files_and_says_so(place, tmp_path):
    (tmp_path / "disk-n2").write_text("no folder")
    left = tmp_path / "disk-n1" / "megakernel-99999"  # of a job that Slurm does not know
    left.mkdir(parents=True)
    log = run_staged("partly", f"{tmp_path}/disk-$SLURMD_NODENAME")
    assert "== staged on 1 nodes" in log
    assert f"== n2: not staged ([Errno 20] Not a directory: '{tmp_path}/disk-n2/megakernel-" in log
    assert f"processes read {sys.prefix}" in log
    assert not left.exists()

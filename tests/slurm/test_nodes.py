"""Unfit and lost nodes, time and memory limits, and jobs that have left Slurm's queue."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch.exit_status import ExitStatus
from launch.slurm.job_folder import JobFolder
from launch.slurm.submission import write_snapshot
from tests.distributed.training_run import scalars, train
from tests.slurm.submitting import (
    crash,
    last,
    losses,
    megakernel,
    scontrol,
    start_slurmd,
    status,
    story,
    submit,
    until,
    until_state,
    until_step,
)

ONE_GPU_ON_N1 = """#!/bin/bash
echo "0, 81559"
[ "$SLURMD_NODENAME" = n1 ] || echo "12, 81559"
"""
"""An nvidia-smi that shows two GPUs, but only one on node n1."""


@pytest.fixture(scope="module")
def one_gpu_on_n1(place):
    """Settings of a cluster whose first node has lost one of two GPUs."""
    driver = place / "driver" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text(ONE_GPU_ON_N1)
    driver.chmod(0o755)
    settings = f"gpus_per_node: 2\npreflight_mib: 0\nsetup: ['export PATH={driver.parent}:$PATH']\n"
    Path("cluster.yaml").write_text(settings)


@pytest.mark.timeout(600)
def test_a_node_that_lost_a_gpu_is_named_and_excluded(one_gpu_on_n1):
    submit("run.yaml --name unfit training.steps=2 --cluster cluster.yaml")
    assert until_state("unfit", "COMPLETED", "FAILED")["nodes"] == "n2"
    assert story("unfit") == ["submitted", "started", "unfit", "ended", "requeued", "started", "ended"]
    found = last("unfit", "unfit")
    assert (found["node"], found["why"]) == ("n1", "1 of 2 GPUs can be seen")
    assert last("unfit", "requeued")["without"] == ["n1"]
    assert "a node is not fit (n1: 1 of 2 GPUs can be seen)" in megakernel("logs unfit --rank batch").out
    assert list(losses("unfit")) == [1, 2]


@pytest.mark.second
@pytest.mark.timeout(600)
def test_a_node_whose_all_reduces_fail_is_named_and_excluded(place):
    Path("python").write_text(
        f"""#!/bin/bash
[ "$SLURMD_NODENAME" = n1 ] && export GLOO_SOCKET_IFNAME=nosuch0
exec {sys.executable} "$@"
"""
    )
    Path("python").chmod(0o755)
    Path("broken.yaml").write_text("gpus_per_node: 2\npreflight_mib: 1\nsetup: ['python=$PWD/python']\n")
    (job,) = submit("run.yaml --name broken --cluster broken.yaml")
    until(lambda: story("broken")[-1] == "requeued")
    assert story("broken") == ["submitted", "started", "unfit", "ended", "requeued"]
    found = last("broken", "unfit")
    assert found["node"] == "n1"
    assert found["why"].startswith("an all-reduce of its own processes fails (")
    assert "nosuch0" in found["why"]
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True)
    assert "ExcNodeList=n1" in shown.stdout
    assert megakernel("cancel broken").status == 0


@pytest.mark.second
@pytest.mark.timeout(600)
def test_a_stop_request_during_the_preflight_ends_the_job(place):
    Path("slow-python").write_text(
        f"""#!/bin/bash
case "$*" in *slurm.preflight*) touch looking; sleep 60 ;; esac
exec {sys.executable} "$@"
"""
    )
    Path("slow-python").chmod(0o755)
    Path("looks.yaml").write_text("preflight_mib: 0\nsetup: ['python=$PWD/slow-python']\n")
    submit("run.yaml --name early -N 2 --cluster looks.yaml")
    until(Path("looking").exists)
    assert "saves and ends" in megakernel("cancel early --save").out
    ended = until_state("early", "FAILED", "CANCELLED", "COMPLETED")
    assert ended["why"] == "ended on request"
    assert losses("early") == {}


@pytest.mark.second
@pytest.mark.timeout(600)
def test_a_job_skips_ports_that_are_in_use(place):
    (job,) = submit("run.yaml --name crowded -N 2 --sbatch hold training.steps=2")
    ports = [20000 + (7 * int(job) + offset) % 12000 for offset in range(3)]
    with contextlib.ExitStack() as listening:
        for port in ports:
            listening.enter_context(socket.create_server(("", port)))
        scontrol("release", job)
        assert until_state("crowded", "COMPLETED", "FAILED")["state"] == "COMPLETED"
    assert list(losses("crowded")) == [1, 2]


@pytest.mark.timeout(600)
def test_if_all_nodes_are_slower_than_the_limit_the_job_fails(place):
    Path("slow.yaml").write_text("preflight_mib: 1\npreflight_seconds: 0.000001\n")
    submit("run.yaml --name slow -N 2 --cluster slow.yaml")
    slow = until_state("slow", "FAILED", "COMPLETED")
    assert slow["state"] == "FAILED"
    assert slow["why"].startswith("failed (n1: an all-reduce with n2 takes ")
    assert [
        event["node"] for event in JobFolder(Path("runs/slow")).events() if event["event"] == "unfit"
    ] == [
        "n1",
        "n2",
    ]
    assert "== the slowest all-reduce between two nodes takes" in megakernel("logs slow --rank batch").out
    assert losses("slow") == {}


@pytest.mark.timeout(600)
def test_a_spare_node_replaces_an_unfit_one(one_gpu_on_n1):
    submit("run.yaml --name spared training.steps=2 --cluster cluster.yaml --spares 1")
    assert until_state("spared", "COMPLETED", "FAILED")["nodes"] == "n[1-2]"
    assert story("spared") == ["submitted", "started", "unfit", "ended"]
    assert last("spared", "unfit")["node"] == "n1"
    (file,) = Path("runs/spared/logs").glob("*/*/nodes")
    assert file.read_text() == "n2"
    assert list(losses("spared")) == [1, 2]


@pytest.mark.second
@pytest.mark.timeout(600)
def test_a_run_whose_node_is_lost_continues(place):
    submit("run.yaml --name lost")
    until_step("lost", 12)
    assert status("lost")["nodes"] == "n1"
    scontrol("update", "NodeName=n1", "State=DOWN", "Reason=test")
    # Its slurmd still runs and registers again: the cluster has ReturnToService=2.
    assert until_state("lost", "COMPLETED", "FAILED")["state"] == "COMPLETED"
    assert "DUE TO NODE FAILURE" in megakernel("logs lost --rank batch").out
    assert story("lost").count("started") == 2
    assert sorted(losses("lost")) == list(range(1, 101))

    checkpoints = Path("runs/lost/checkpoints")
    before = sorted(path.name for path in checkpoints.iterdir())
    said = megakernel("resume lost --from-step 7")
    assert (said.status, len(said.err.splitlines())) == (2, 1)
    assert "no checkpoint of that step; there are 90, 100" in said.err
    assert megakernel("resume lost --from-step 90 -p nosuch").status == 4
    assert sorted(path.name for path in checkpoints.iterdir()) == before

    assert megakernel("resume lost --from-step 90 --sbatch hold").status == 0
    assert {path.name for path in checkpoints.glob("step_*")} == {"step_90", "step_100.set_aside"}
    assert megakernel("cancel lost").status == 0


@pytest.mark.second
@pytest.mark.timeout(900)
@pytest.mark.parametrize("comes_back", [True, False], ids=["comes back", "given up"])
def test_a_crashed_node_costs_a_job_only_the_steps_since_its_last_checkpoint(
    place, impatient_slurm, comes_back, monkeypatch
):
    # The job must ignore torchrun's variables, which it inherits if it is submitted under torchrun.
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    run = f"crashed-{comes_back}"
    # srun gives up processes after 17 s instead of 72, so before Slurm gives up the node, as with the shipped settings.
    (job,) = submit(f"run.yaml --name {run} -N 2 --env SLURM_WAIT=5")
    until_step(run, 15)
    crash("n2")
    until(lambda: story(run, job)[-1] == "waits", seconds=400)
    assert last(run, "waits")["nodes"] == ["n2"]
    ended = last(run, "ended")
    assert ended["status"] == ExitStatus.FAILED or ended["status"] > 128
    assert ended["step"] >= 10
    if not comes_back:
        until(lambda: status(run)["state"] == "PENDING", seconds=400)
    start_slurmd("n2")
    done = until_state(run, "COMPLETED", "FAILED")
    assert (done["state"], done["nodes"]) == ("COMPLETED", "n[1-2]")
    # Slurm itself restarts a job whose node it has given up. A signal meant for the first start may end the second.
    again = ["requeued", "started"] if comes_back else ["started"]
    seen = ["submitted", "started", "failed", "ended", "waits", *again]
    assert story(run, job)[: len(seen)] == seen
    expected = train(place / "run.yaml", 2, f"run.name=whole-{comes_back}", "data.num_workers=0")
    assert list(losses(run).values()) == scalars(expected, "train/loss")


@pytest.mark.second
@pytest.mark.timeout(900)
def test_a_job_with_a_spare_node_restarts_within_the_job(place, impatient_slurm):
    (job,) = submit("run.yaml --name inside --spares 1 training.steps=300")
    until_step("inside", 15)
    crash("n2")
    done = until_state("inside", "COMPLETED", "FAILED", seconds=400)
    start_slurmd("n2")
    assert (done["state"], done["restarts"]) == ("COMPLETED", 1)
    assert last("inside", "lost")["nodes"] == ["n2"]
    assert story("inside", job) == ["submitted", "started", "ended", "lost", "started", "ended"]
    expected = train(place / "run.yaml", 1, "run.name=alone", "training.steps=300", "data.num_workers=0")
    assert list(losses("inside").values()) == scalars(expected, "train/loss")


@pytest.mark.second
@pytest.mark.timeout(600)
def test_a_job_saves_before_its_time_limit_and_stays_ended_with_no_requeue(place):
    (job,) = submit("run.yaml --name limit training.steps=100000 -t 2 --signal-delay 30 --no-requeue")
    ended = until_state("limit", "FAILED", "TIMEOUT")
    assert ended["why"] == "saved and stopped to make room; requeuing is off"
    assert ended["saved"] == ended["step"] == last("limit", "signalled")["step"]
    assert story("limit", job) == ["submitted", "started", "signalled", "ended"]


@pytest.mark.second
@pytest.mark.timeout(600)
def test_out_of_memory_and_a_non_finite_loss_are_distinguished(place):
    submit("run.yaml --name large -p high --mem 300 --no-requeue")
    submit("run.yaml --name wild -p high optimizer.lr=1e30 training.max_skipped_steps=2")
    large = until_state("large", "FAILED", "COMPLETED", "OUT_OF_MEMORY")
    assert (large["state"], last("large", "ended")["status"]) == ("FAILED", ExitStatus.OUT_OF_MEMORY)
    assert re.match(r"ran out of memory, which --mem can raise \(n\d: \d+ MiB of 300 MiB\); ", large["why"])
    wild = until_state("wild", "FAILED", "COMPLETED")
    assert (wild["state"], last("wild", "ended")["status"]) == ("FAILED", ExitStatus.NOT_FINITE)
    assert wild["why"].startswith("the loss or its gradients stayed non-finite (rank 0 on ")
    assert "training.max_skipped_steps=2" in last("wild", "failed")["why"]
    assert story("wild") == ["submitted", "started", "failed", "ended"], "it must not restart"


def test_a_job_runs_the_code_of_its_submission_in_any_folder_and_with_its_share_of_the_cores(place, tmp_path):
    checkout = tmp_path / "checkout"
    write_snapshot(checkout)
    for words in ("init --quiet", "add --all", "-c user.name=t -c user.email=t@t commit --quiet -m first"):
        subprocess.run(["git", *words.split()], cwd=checkout, check=True)
    odd = checkout / "%j of 50%"
    odd.mkdir()
    (odd / "part.jsonl").write_text('{"text": "one document"}\n' * 20)
    words = "submit --name kept -G simulated:1 --sbatch hold -- prepare --source part.jsonl --tokenizer byte"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "launch.cli",
            *words.split(),
            "--out",
            "corpus",
            "--validation-fraction",
            "0",
        ],
        cwd=odd,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        check=True,
    )
    shutil.rmtree(checkout / "launch")
    (checkout / "launch").mkdir()
    (checkout / "launch/__init__.py").write_text(
        "raise SystemExit('this is not the code that was submitted')"
    )
    run = JobFolder(odd / "runs/kept")
    job = run.jobs()[0].id
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True)
    assert "CPUs/Task=2" in shown.stdout, "one of two GPUs has two of four cores"
    scontrol("release", job)
    until(lambda: any(event["event"] == "ended" for event in run.events()))
    assert run.events()[-1]["why"] == "done", (run.path / f"logs/{job}.log").read_text()
    assert (odd / "corpus/manifest.json").exists()
    assert "on n" in (run.path / f"logs/{job}.log").read_text()


@pytest.mark.second
def test_a_job_that_has_left_the_queue_still_has_a_state(place, monkeypatch, tmp_path):
    said = megakernel("submit --wait --json --name forgotten -- evaluate runs/nosuch")
    assert said.status == 1
    (job,) = json.loads(said.out)["jobs"]
    queue = ["squeue", "--states=all", "--noheader", "--format=%i"]
    until(lambda: job not in subprocess.run(queue, capture_output=True, text=True).stdout.split())
    assert status("forgotten")["state"] == "FAILED"  # by the list of completed jobs
    (tmp_path / "squeue").symlink_to(str(shutil.which("squeue")))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert status("forgotten")["state"] == "FAILED"  # by the run's own events
    assert "refused its command line or configuration (runs/nosuch" in status("forgotten")["why"]


def test_a_missing_cluster_is_reported_at_once(place, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(place / "nosuch.conf"))
    said = megakernel("submit run.yaml --test-only")
    assert said.status == 4
    assert "nosuch.conf does not exist; unset it, or start that cluster" in said.err
    assert os.environ["SLURM_CONF"] in said.err

"""Training on two nodes gives the same losses as on this machine, whatever interrupts the job."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launch.exit_status import ExitStatus
from launch.slurm.states import queue_states
from tests.distributed.training_run import scalars, train
from tests.slurm.submitting import (
    kill,
    last,
    losses,
    megakernel,
    metrics,
    process_of,
    scontrol,
    status,
    story,
    submit,
    until,
    until_state,
    until_step,
)

STEPS = 300
"""Steps of runs that are interrupted: enough that they still train when a slow Slurm acts."""
LONG = f"training.steps={STEPS}"


def here(place, processes):
    """Losses of a run with this many processes on this machine, without Slurm and interruptions."""
    # Ranks are daemonic multiprocessing processes here, which may have no children.
    options = (f"run.name=here-{processes}", LONG, "data.num_workers=0")
    return scalars(train(place / "run.yaml", processes, *options), "train/loss")


@pytest.fixture(scope="module")
def of_two(place):
    return here(place, 2)


def same(run, uninterrupted):
    assert list(losses(run).values()) == uninterrupted
    assert sorted(losses(run)) == list(range(1, STEPS + 1))


@pytest.mark.second
@pytest.mark.timeout(600)
def test_a_preempted_run_on_two_nodes_loses_no_step(place):
    (job,) = submit(f"run.yaml --name preempted -N 2 -G 2 {LONG}")
    until_step("preempted", 23)
    now = status("preempted")
    assert (now["state"], now["nodes"], now["steps"]) == ("RUNNING", "n[1-2]", STEPS)
    assert now["heartbeat"] < 30

    # A job of a partition with higher priority takes both nodes.
    baseline = ["sbatch", "--parsable", "-p", "high", "-N", "2", "--exclusive", "-o", "/dev/null", "--wrap"]
    other = subprocess.run(
        [*baseline, "sleep 600"], capture_output=True, text=True, check=True
    ).stdout.strip()
    until_state("preempted", "PENDING")
    # Slurm sets the reason for waiting when its scheduler next runs.
    waiting = until(lambda: (now := status("preempted"))["why"].count("; ") and now)
    assert waiting["why"].startswith("saved and stopped to make room; ")
    step = last("preempted", "signalled")["step"]
    assert last("preempted", "ended")["step"] == waiting["saved"] == step
    assert [line["step"] for line in metrics("preempted")] == list(range(1, step + 1))

    subprocess.run(["scancel", other], check=True)
    done = until_state("preempted", "COMPLETED", "FAILED")
    assert (done["state"], done["restarts"], done["why"]) == ("COMPLETED", 1, "done")
    assert story("preempted", job) == [
        "submitted",
        "started",
        "signalled",
        "ended",
        "requeued",
        "started",
        "ended",
    ]
    same("preempted", here(place, 4))
    # No step was computed twice: the signal made the run save its last step.
    shown = megakernel(f"logs {job} --restart 1 --grep continuing").out
    assert shown.strip().endswith(f"step_{step}")


@pytest.fixture
def preempting_without_grace(cluster):
    """Low priority jobs are cancelled at once, as on clusters with PreemptMode=CANCEL."""
    scontrol("update", "PartitionName=low", "PreemptMode=CANCEL", "GraceTime=0")
    yield
    scontrol("update", "PartitionName=low", "PreemptMode=REQUEUE", "GraceTime=60")


@pytest.mark.second
@pytest.mark.timeout(600)
def test_a_run_that_a_preemption_cancels_starts_again(place, of_two, preempting_without_grace):
    """Slurm sends TERM, as for a job that its user cancels, and calls the job PREEMPTED."""
    (job,) = submit(f"run.yaml --name evicted -N 2 {LONG}")
    until_step("evicted", 23)
    other = [
        "sbatch",
        "--parsable",
        "-p",
        "high",
        "-N",
        "2",
        "--exclusive",
        "-o",
        "/dev/null",
        "--wrap",
        "sleep 9",
    ]
    subprocess.run(other, capture_output=True, text=True, check=True)
    until(lambda: "ended" in story("evicted", job))
    ended = last("evicted", "ended")
    assert (last("evicted", "signalled")["signal"], ended["why"]) == (
        "SIGTERM",
        "saved and stopped to make room",
    )
    assert ended["step"] == last("evicted", "signalled")["step"]
    done = until_state("evicted", "COMPLETED", "FAILED", "CANCELLED", "PREEMPTED")
    assert (done["state"], done["restarts"], done["why"]) == ("COMPLETED", 1, "done")
    same("evicted", of_two)


@pytest.mark.timeout(600)
def test_a_run_with_a_killed_rank_restarts_saves_on_request_and_resumes_on_another_layout(place, of_two):
    (job,) = submit(f"run.yaml --name killed -N 2 --env SLURM_WAIT=5 --env HF_TOKEN=hunter2 {LONG}")
    until_step("killed", 15)
    kill(job, 1, signal.SIGKILL)
    until(lambda: story("killed", job)[-1] == "requeued")
    assert "(rank 1 on n2: Killed)" in last("killed", "ended")["why"]
    assert last("killed", "ended")["step"] >= 10

    until(lambda: story("killed", job)[-1] == "started")
    until_step("killed", 40)
    assert b"HF_TOKEN=hunter2" in Path(f"/proc/{process_of(job, 1)}/environ").read_bytes().split(b"\0")
    assert "saves and ends" in megakernel("cancel killed --save").out
    ended = until_state("killed", "FAILED", "CANCELLED", "COMPLETED")
    assert (ended["state"], ended["why"]) == ("CANCELLED", "ended on request")
    assert queue_states([os.getuid()])[job].state == "COMPLETED", "jobs that wait for it with afterok start"
    assert ended["saved"] == last("killed", "signalled")["step"]
    assert story("killed", job)[-3:] == ["cancelled", "signalled", "ended"]
    assert megakernel("resume killed -N 1 -G 1 --json").status == 0
    assert until_state("killed", "COMPLETED", "FAILED")["state"] == "COMPLETED"
    found, step = list(losses("killed").values()), ended["saved"]
    assert found[:step] == of_two[:step]
    # Another layout sums in another order: float32 rounding differences, which grow over the steps.
    assert found[step : step + 5] == pytest.approx(of_two[step : step + 5], rel=1e-5)
    assert len(found) == STEPS


@pytest.mark.second
@pytest.mark.timeout(600)
def test_a_rank_that_hangs_ends_the_job_and_the_next_of_the_chain_continues(place, of_two):
    # The rank hangs between saves: in a save only the collectives' timeout would detect it.
    saves, limit = "checkpoint.every=30", "parallel.stall_minutes=0.2"
    jobs = submit(f"run.yaml --name chain -N 2 --chain 4 --env SLURM_WAIT=5 {LONG}", saves, limit)
    assert len(jobs) == 4
    until_step("chain", 32)
    kill(jobs[0], 1, signal.SIGSTOP)
    until(lambda: "ended" in story("chain", jobs[0]))
    # The waiting ranks end the job; the one that they wait for has to be killed.
    assert "rank 1 on " in megakernel(f"logs {jobs[0]} --rank all --stderr --grep progress").out
    until(lambda: "started" in story("chain", jobs[1]))
    until_step("chain", 50)
    assert megakernel("cancel chain").status == 0  # only this job of the chain
    until(lambda: status("chain")["jobs"][jobs[1]] == "CANCELLED")
    until(lambda: "started" in story("chain", jobs[2]))
    until_step("chain", last("chain", "started")["step"] + 3)
    subprocess.run(["scancel", "--signal=USR2", jobs[2]], check=True)  # as before a time limit
    until(lambda: status("chain")["jobs"][jobs[2]] == "COMPLETED")
    assert last("chain", "ended")["status"] == ExitStatus.STOPPED
    until(lambda: status("chain")["jobs"][jobs[3]] == "COMPLETED")
    same("chain", of_two)


@pytest.mark.second
@pytest.mark.timeout(600)
def test_array_members_have_own_folders_and_restart_separately(place):
    Path("sweep.yaml").write_text(
        "config: run.yaml\nname: grid\ngrid:\n  optimizer.lr: [1e-3, 2e-3]\n  training.steps: [200]\n"
    )
    said = megakernel("sweep sweep.yaml --array %1 --json")
    assert said.status == 0, said.err
    answer = json.loads(said.out)
    assert answer["runs"] == ["runs/grid-0", "runs/grid-1"]
    # The second member waits for the first, and then finds another configuration in its folder.
    config = Path("runs/grid-1/submissions", answer["submission"], "config.yaml")
    Path("runs/grid-1/config.yaml").write_text(config.read_text().replace("seed: 7", "seed: 8"))

    first, array = answer["jobs"][0], answer["jobs"][0].partition("_")[0]
    assert [json.loads(line)["run"] for line in megakernel("status grid --json").out.splitlines()] == answer[
        "runs"
    ]
    assert megakernel("status", array).out.count("grid-") == 2
    until_step("grid-0", 3)
    assert "grid-0: step " in megakernel("logs grid-* --grep step").out
    subprocess.run(["scancel", "--signal=USR2", first], check=True)
    until(lambda: story("grid-0", first)[-1] == "requeued")

    assert until_state("grid-1", "FAILED", "COMPLETED")["state"] == "FAILED"
    assert last("grid-1", "ended")["status"] == ExitStatus.USAGE
    assert "run.seed=7 was 8 when the run began" in last("grid-1", "ended")["why"]
    assert losses("grid-1") == {}
    done = until_state("grid-0", "FAILED", "COMPLETED")
    assert (done["state"], done["restarts"], list(losses("grid-0"))) == ("COMPLETED", 1, list(range(1, 201)))

    Path("runs/grid-1/config.yaml").unlink()
    assert megakernel("resume grid training.steps=210 --sbatch hold").status == 0
    assert [status(run)["state"] for run in answer["runs"]] == ["PENDING", "PENDING"]
    said = megakernel("cancel grid-* --chain")
    assert said.out.count(" ends: runs/grid-") == 2
    for run in answer["runs"]:
        until_state(run, "CANCELLED")


@pytest.mark.second
@pytest.mark.timeout(600)
def test_an_up_training_continues_in_the_interrupted_stage(place):
    train(
        place / "run.yaml",
        1,
        "run.name=dense",
        "model.attention=softmax",
        "training.steps=2",
        "data.num_workers=0",
    )
    Path("up.yaml").write_text(
        "extends: run.yaml\ninit: {from: runs/dense}\nuptrain: {transfer: {steps: 4}, alpha: 0}\n"
    )
    # The first checkpoint of a stage is the one that the signal causes, however fast the steps are.
    (job,) = submit("up.yaml --name up -N 2 training.steps=200 training.eval_samples=4 checkpoint.every=1000")
    until_step("up/2-main", 3)
    now = status("up")
    assert (now["stage"], now["steps"], now["saved"]) == ("2-main", 200, 0)
    subprocess.run(["scancel", "--signal=USR2", job], check=True)
    until(lambda: story("up", job)[-1] == "requeued")
    step = last("up", "signalled")["step"]
    assert last("up", "ended")["step"] == 4 + step, "of both stages"

    done = until_state("up", "COMPLETED", "FAILED")
    assert (done["state"], done["stage"], done["step"]) == ("COMPLETED", "2-main", 200)
    assert story("up", job) == ["submitted", "started", "signalled", "ended", "requeued", "started", "ended"]
    assert list(losses("up/2-main")) == list(range(1, 201)), "no step was lost or repeated"
    assert Path("runs/up/uptrain_report.md").exists()
    said = megakernel("resume up --from-step 4")
    assert (said.status, len(said.err.splitlines())) == (2, 1)
    assert "each stage of runs/up has steps of its own" in said.err


@pytest.mark.second
@pytest.mark.timeout(600)
def test_a_pipeline_of_jobs_can_be_submitted_at_once_by_run_names(place):
    Path("piped.yaml").write_text(
        "extends: run.yaml\ndata: {train: piped}\nmodel: {attention: softmax}\ntraining: {steps: 4}\n"
    )
    Path("raised.yaml").write_text(
        "extends: run.yaml\ndata: {train: piped}\ninit: {from: runs/p-dense}\ntraining: {steps: 4}\n"
        "uptrain: {transfer: {steps: 2}, alpha: 0}\n"
    )
    text = "--source part.jsonl --tokenizer byte --out piped --validation-fraction 0.2"
    lines = [json.dumps({"text": f"document {at} " * 90}) for at in range(40)]
    Path("part.jsonl").write_text("\n".join(lines))
    submit("--name p-text --sbatch hold -- prepare", text)
    submit("piped.yaml --name p-dense --dependency afterok:p-text")
    submit("raised.yaml --name p-up --dependency afterok:p-dense training.eval_samples=4")
    submit("--name p-ppl --dependency afterok:p-up -- evaluate runs/p-up/2-main --json")
    submit("--name p-hf --dependency afterok:p-up,afterany:p-ppl -- export runs/p-up/2-main --to hf")
    assert {status(run)["why"] for run in ("p-dense", "p-up", "p-ppl", "p-hf")} == {"Dependency"}
    scontrol("release", status("p-text")["job"])
    for run in ("p-text", "p-dense", "p-up", "p-ppl", "p-hf"):
        done = until_state(run, "COMPLETED", "FAILED", "CANCELLED")
        assert done["state"] == "COMPLETED", done
    assert Path("hf/config.json").exists()
    # A fulfilled dependency is dropped, as Slurm may have forgotten the job; an impossible one is refused.
    assert "--dependency" not in megakernel("submit run.yaml --dependency afterok:p-dense --dry-run").out
    said = megakernel("submit run.yaml --dependency afternotok:p-dense")
    assert (said.status, "has ended" in said.err) == (2, True)


def test_an_array_prepares_a_corpus_for_each_part_of_the_text(place):
    for number in (0, 1):
        lines = [json.dumps({"text": f"part {number}, document {at} " * 40}) for at in range(20)]
        Path(f"part-{number}.jsonl").write_text("\n".join(lines))
    said = megakernel(
        "submit --array 0-1 --name parts --wait --json --",
        "prepare --source part-%a.jsonl --tokenizer byte --out parts/%a --validation-fraction 0.2",
    )
    assert said.status == 0, said.err
    assert json.loads(said.out)["runs"] == ["runs/parts-0", "runs/parts-1"]
    for number in (0, 1):
        assert f"part-{number}.jsonl" in Path(f"parts/{number}/manifest.json").read_text()


@pytest.mark.parametrize(("host", "way"), [("", "127.0.0.1:{0} -J"), ("0.0.0.0", "127.0.0.1:{0} LOGIN")])
def test_tensorboard_listens_only_on_its_node_without_a_host(host, way, place):
    script = Path(__file__).parents[2] / "slurm" / "tensorboard.sbatch"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    typed = ["env", f"PATH={path}", "sbatch", "--parsable", script, ".", *host.split()]
    job = subprocess.run(typed, capture_output=True, text=True, check=True).stdout.strip()
    log = Path(f"tensorboard-{job}.log")
    until(lambda: log.exists() and "TensorBoard 2" in log.read_text())
    port = 20000 + int(job) * 7 % 12000
    sockets = [one for one in psutil.net_connections("tcp") if one.laddr.port == port]
    subprocess.run(["scancel", job], check=True)
    assert {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN} == {host or "127.0.0.1"}
    assert f"ssh -N -L 6006:{way.format(port)}" in log.read_text()


@pytest.mark.second
def test_nodes_are_checked_without_training(place):
    script = Path(__file__).parents[2] / "slurm" / "preflight.sbatch"
    options = ["-N", "2", "--gpus-per-node", "2", "--ntasks-per-node", "2", "-o", "preflight.log"]
    # The script uses the submitter's `python`, which must have this environment.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["sbatch", "--wait", *options, str(script)], check=True, env=os.environ | {"PATH": path})
    within, between, *nodes = Path("preflight.log").read_text().splitlines()
    assert within.startswith("the slowest all-reduce within a node takes ")
    assert between.startswith("the slowest all-reduce between two nodes takes ")
    assert nodes == ["n1 is fit", "n2 is fit"]

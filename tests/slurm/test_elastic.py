"""A job of MIN-MAX nodes goes on with those that are there: the same batches and, up to the layout, the same losses."""

import subprocess
from pathlib import Path

import pytest

from launch.slurm.job_folder import JobFolder
from tests.distributed.training_run import scalars, train
from tests.slurm.submitting import (
    crash,
    last,
    losses,
    megakernel,
    metrics,
    scontrol,
    start_slurmd,
    story,
    submit,
    until,
    until_state,
    until_step,
)

STEPS = 150


@pytest.fixture(scope="module")
def of_two(place):
    """Losses of a run with two processes on this machine."""
    options = ("run.name=here", f"training.steps={STEPS}", "data.num_workers=0")
    return scalars(train(place / "run.yaml", 2, *options, timeout=600.0), "train/loss")


def as_promised(run, of_two, step):
    """Bit for bit the losses of two processes up to `step`, and from there on those of another layout."""
    found = losses(run)
    assert sorted(found) == list(range(1, STEPS + 1)), "no step is lost or repeated"
    values = list(found.values())
    assert values[:step] == of_two[:step]
    # Another layout sums in another order: float32 rounding differences, which grow over the steps.
    assert values[step : step + 5] == pytest.approx(of_two[step : step + 5], rel=1e-5)
    tokens = [line["train/tokens"] for line in metrics(run)]
    assert tokens == [step * tokens[0] for step in range(1, STEPS + 1)], "the global batch stays the same"


def stop(job):
    """What Slurm sends before a time limit or a preemption."""
    subprocess.run(["scancel", "--signal=USR2", job], check=True)


@pytest.mark.second
@pytest.mark.timeout(1500)
def test_a_requeued_job_goes_on_with_the_nodes_that_are_left_and_with_all_when_they_are_back(place, of_two):
    (job,) = submit(f"run.yaml --name elastic -N 1-2 training.steps={STEPS}")
    until_step("elastic", 12)
    assert last("elastic", "started")["nodes"] == "n[1-2]"
    scontrol("update", "NodeName=n2", "State=DRAIN", "Reason=test")
    stop(job)
    until(lambda: story("elastic", job)[-1] == "requeued")
    first = last("elastic", "ended")["step"]
    until(lambda: story("elastic", job)[-1] == "started")
    assert last("elastic", "started")["nodes"] == "n1"
    until_step("elastic", first + 8)
    scontrol("update", "NodeName=n2", "State=RESUME")
    stop(job)
    until(lambda: story("elastic", job)[-1] == "requeued")
    done = until_state("elastic", "COMPLETED", "FAILED", seconds=600)
    assert (done["state"], done["nodes"], done["restarts"]) == ("COMPLETED", "n[1-2]", 2)
    as_promised("elastic", of_two, first)
    log = megakernel("logs elastic --rank batch --grep train:").out
    shown = [line.partition("nodes that train: ")[2] for line in log.splitlines()]
    assert shown == ["2 (of 1-2)", "1 (of 1-2)", "2 (of 1-2)"]


@pytest.mark.second
@pytest.mark.timeout(1500)
def test_a_job_that_loses_a_node_goes_on_at_once_with_the_other(place, of_two, impatient_slurm):
    (job,) = submit(f"run.yaml --name shrunk -N 1-2 --env SLURM_WAIT=5 training.steps={STEPS}")
    until_step("shrunk", 15)
    # The batch script is on the first node.
    crash("n2")
    done = until_state("shrunk", "COMPLETED", "FAILED", seconds=600)
    start_slurmd("n2")
    assert (done["state"], done["restarts"]) == ("COMPLETED", 1)
    assert last("shrunk", "lost")["nodes"] == ["n2"]
    assert "requeued" not in story("shrunk", job)
    (second,) = Path("runs/shrunk/logs").glob("*/1/nodes")
    assert second.read_text() == "n1"
    ends = [event for event in JobFolder(Path("runs/shrunk")).events() if event["event"] == "ended"]
    as_promised("shrunk", of_two, ends[0]["step"])

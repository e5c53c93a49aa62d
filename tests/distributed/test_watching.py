"""Histograms, traces and the slowest rank are the same on every layout."""

import gzip
import json
import time
from functools import cache

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from megakernel.training.observing.local_work import LocalWork, slowest
from tests.distributed.processes import cpu_mesh, run_ranks
from tests.distributed.training_run import metrics, pretrain_tracked, train
from tests.tracked import DATABASES, trackio_history, trackio_runs, wandb_history, wandb_runs

pytestmark = pytest.mark.second

ATTENTION = "{preset: flurka, near: {kind: softmax, join: gated, gate: token}, compression: {block_size: 16, rank: 4}}"
OPTIONS = (
    "training.steps=1",
    "training.eval_samples=0",
    "model.num_layers=2",
    f"model.attention_pattern=[{ATTENTION}]",
    "logging.histograms_every=1",
)


def histograms(run):
    reader = EventAccumulator(str(run), size_guidance={"histograms": 0}).Reload()
    return {tag: reader.Histograms(tag)[0].histogram_value for tag in reader.Tags()["histograms"]}


LAYOUTS = {
    "one": [],
    "tp2": ["parallel.tensor=2"],
    "cp2_zero3": ["parallel.context=2", "parallel.zero_stage=3"],
    "pp2_zero1": ["parallel.pipeline=2", "parallel.zero_stage=1"],
    "dp2_zero2": ["parallel.zero_stage=2", "training.profile={start: 1, steps: 1}"],
}


@pytest.fixture(scope="module")
def trained(config):
    """Name of a layout -> the folder of a run of one step, trained when first asked for."""

    @cache
    def folder(name):
        train(config, 1 if name == "one" else 2, *OPTIONS, f"run.name={name}", *LAYOUTS[name])
        return config.parent / name

    return folder


@pytest.fixture(scope="module")
def one_process(trained):
    return histograms(trained("one"))


def test_weights_gradients_and_gates_have_histograms(one_process):
    kinds = {
        kind: [tag for tag in one_process if tag.startswith(kind)]
        for kind in ("weights", "gradients", "gates")
    }
    assert len(kinds["gates"]) == 2
    assert len(kinds["weights"]) == len(kinds["gradients"]) > 10
    gate = one_process[kinds["gates"][0]]
    # 4 heads, 128 tokens, 2 sequences of the last micro-batch; with weights of zero every gate is its bias.
    assert (gate.num, gate.min, gate.max) == (4 * 128 * 2, gate.max, gate.min)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_histograms_over_two_ranks_equal_those_of_one(trained, one_process, layout):
    by_tag = histograms(trained(layout))
    assert by_tag.keys() == one_process.keys()
    for tag, expected in one_process.items():
        actual = by_tag[tag]
        if tag.startswith("gradients/"):
            # Sums in another order move some gradients into the next bucket, but do not change their number.
            assert actual.num == expected.num
            assert actual.sum_squares == pytest.approx(expected.sum_squares, rel=1e-4)
            assert actual.max == pytest.approx(expected.max, rel=1e-3, abs=1e-7)
        elif tag.startswith("weights/"):
            assert list(actual.bucket) == list(expected.bucket), tag
            assert (actual.num, actual.min, actual.max) == (expected.num, expected.min, expected.max)


def test_every_rank_writes_a_trace_with_named_modules_and_phases(trained):
    folder = trained("dp2_zero2") / "profile" / "step_1"
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0.json.gz", "rank_1.json.gz"]
    for trace in folder.iterdir():
        names = {
            event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        }
        assert {"step 1", "forward", "backward", "optimizer"} <= names
        assert {"1 (TransformerLayer)", "2.self_attention.core (FlurkaAttention)"} <= names
        assert {"_RmsNorm", "_RmsNormBackward"} <= names


class Slow(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return x


def _measure_local_work():
    with cpu_mesh() as mesh:
        model = Slow(0.02 if mesh.rank == 1 else 0.001)
        work = LocalWork(model, mesh)
        for _ in range(3):
            model(torch.zeros(1))
        with torch.no_grad():
            model.eval()(torch.zeros(1))
        return work.scalars(3, data_seconds=0.001, step_seconds=0.01 / (mesh.rank + 1)), work.slowest


def test_all_ranks_name_the_rank_that_works_longest():
    (first, named), (second, _) = run_ranks(_measure_local_work, 2)
    assert first == second
    assert first["health/slowest_rank"] == named["rank"] == 1
    # 21 ms over 2 ms; a busy machine lengthens both sleeps, the shorter one by a larger factor.
    assert first["health/straggle"] > 1.5
    assert first["health/data_share"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("seconds", "stages", "expected"),
    [
        ([1.0, 1.1, 3.3, 1.0, 1.1], 1, (2, 3.0)),
        ([1.5, 1.0], 1, (0, 1.5)),  # of two ranks the faster one is the reference
        ([1.0, 1.4, 2.0, 2.1], 2, (1, 1.4)),  # the second stage has twice the work
        ([1.0, 5.0], 2, (0, 1.0)),  # the only rank of a stage is compared with itself
    ],
)
def test_the_slowest_rank_is_compared_with_the_median_of_its_pipeline_stage(seconds, stages, expected):
    assert slowest(seconds, stages) == pytest.approx(expected)


@pytest.mark.second
def test_trackers_have_one_run_of_all_ranks_and_restarts(config):
    options = (
        *("run.name=tracked", "training.eval_samples=2", "training.eval_every=1", "checkpoint.every=1"),
        *("logging.wandb={project: ranks, mode: offline}", "logging.trackio={project: ranks}"),
    )
    for steps, world_size in ((2, 2), (3, 1)):
        overrides = (*options, f"training.steps={steps}")
        assert set(run_ranks(pretrain_tracked, world_size, config, overrides, DATABASES)) == {0}
    run = config.parent / "tracked"
    first, second = wandb_runs(run)
    assert first.run_id == second.run_id
    assert trackio_runs("ranks") == {"tracked"}
    logged = metrics(run)
    assert [line["step"] for line in logged] == [0, 1, 2, 3]
    for history in (wandb_history(run), trackio_history("ranks", "tracked")):
        for tag in ("train/loss", "eval/loss", "throughput/tokens_per_sec"):
            shown = [(line["step"], line[tag]) for line in history if tag in line]
            assert shown == [(line["step"], pytest.approx(line[tag])) for line in logged if tag in line], tag

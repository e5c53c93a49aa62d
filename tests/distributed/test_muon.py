"""Muon updates whole matrices in every layout, and resumes bit for bit."""

import random

import pytest
import torch

from tests.distributed.processes import RankFailedError, run_ranks
from tests.distributed.training_run import (
    assert_identical,
    assert_losses_close,
    layout,
    pretrain_killed_at_line,
    scalars,
    train,
    write_config,
)
from tests.tiers import tiered

OPTIONS = (
    *("optimizer.name=muon", "optimizer.muon_lr=1e-2", "training.steps=4", "checkpoint.every=2"),
    *("model.num_kv_heads=2", "model.tie_embeddings=false", "logging.tensorboard=false"),
)
LAYOUTS = [
    "dp2",
    "dp2 zero 1",
    "dp2 zero 2",
    "dp4 zero 2",
    "tp2",
    "tp4",  # two ranks share the rows of a key head
    "tp2 sequence parallel dp2 zero 1",
    "tp2 cp2 zero 2",
    "pp2",
    "pp4",  # stages with neither embedding nor head
    "pp2 dp2 zero 1",
    "cp2 zero 1",
]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, corpus):
    """The configuration and the metrics of one process."""
    config = write_config(tmp_path_factory.mktemp("one"), corpus)
    return config, train(config, 1, *OPTIONS)


@pytest.mark.parametrize("ranks", tiered(LAYOUTS, ["tp2"]))
def test_muon_has_the_losses_of_one_process_in_every_layout(ranks, one_process, tmp_path):
    config, expected = one_process
    actual = train(config, *layout(ranks), *OPTIONS, f"run.root={tmp_path}")
    assert_losses_close(actual, expected)


@pytest.mark.second
def test_muon_is_another_optimizer_than_adamw(one_process, tmp_path):
    config, muon = one_process
    adamw = train(
        config,
        1,
        *OPTIONS,
        "optimizer.name=adamw",
        "optimizer.muon_lr=null",
        "training.steps=2",
        f"run.root={tmp_path}",
    )
    first, second = (scalars(run, "train/loss")[:2] for run in (muon, adamw))
    assert first[0] == second[0]
    assert first[1] != pytest.approx(second[1], rel=1e-4)


@pytest.mark.second
@pytest.mark.parametrize("ranks", ["dp2", "dp2 zero 2", "bfloat16 dp2 zero 1", "tp2 dp2 zero 1"])
def test_a_killed_run_resumes_bit_identically(ranks, one_process, tmp_path):
    config, _ = one_process
    world_size, *overrides = (*layout(ranks), *OPTIONS, "training.steps=6", f"run.root={tmp_path}")
    whole = train(config, world_size, *overrides, "run.name=whole")
    step = random.Random(ranks).randrange(3, 6)
    killed = (*overrides, "run.name=killed")
    with pytest.raises(RankFailedError, match="exit status -9"):
        run_ranks(pretrain_killed_at_line, world_size, f"step {step}/", config, killed)
    assert list((tmp_path / "killed/checkpoints").glob("step_*"))
    assert_identical(train(config, world_size, *killed), whole)


@pytest.mark.second
@pytest.mark.parametrize(("before", "after"), [("dp2 zero 2", "tp2"), ("tp2", "dp2 zero 1"), ("pp2", "dp2")])
def test_a_run_continues_on_another_layout(before, after, one_process, tmp_path):
    config, expected = one_process
    # The schedule of all four steps, of which the first two are taken.
    options = (*OPTIONS, "schedule.name=constant", f"run.root={tmp_path}")
    train(config, *layout(before), *options, "training.steps=2")
    changed = train(config, *layout(after), *options)
    whole = train(config, 1, *options, "run.name=whole")
    assert_losses_close([line for line in changed if line["step"] > 2], [x for x in whole if x["step"] > 2])
    assert scalars(whole, "train/loss") != scalars(expected, "train/loss")


@pytest.mark.second
def test_half_precision_learns_as_single_does(one_process, tmp_path):
    """5 %: bfloat16 has three digits."""
    config, expected = one_process
    half = train(config, *layout("bfloat16 dp2 zero 1"), *OPTIONS, f"run.root={tmp_path}")
    assert scalars(half, "train/loss") == pytest.approx(scalars(expected, "train/loss"), rel=0.05)


def test_the_state_of_muon_is_one_moment(one_process):
    config, _ = one_process
    folder = config.parent / "run/checkpoints/step_4"
    state = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)["optimizer"]["state"]
    moments = [{*state[index]} & {"exp_avg", "exp_avg_sq"} for index in sorted(state)]
    assert moments[:16] == [{"exp_avg"}] * 16, "four matrices in each of four layers"
    assert moments[16:] == [{"exp_avg", "exp_avg_sq"}] * (len(moments) - 16)


@pytest.mark.second
def test_moments_of_another_optimizer_are_refused(one_process, tmp_path):
    config, _ = one_process
    earlier = config.parent / "run"
    moments = f"init.moments={earlier}"
    options = (*OPTIONS, f"init.from={earlier}", f"run.root={tmp_path}")
    adamw = ("optimizer.name=adamw", "optimizer.muon_lr=null", "run.name=adamw")
    with pytest.raises(
        RankFailedError, match=r"init\.moments=.*: muon trained it, .*set that to muon, or remove"
    ):
        train(config, 1, *options, *adamw, moments)
    first, second = (
        scalars(train(config, 2, *options, *more), "train/loss")
        for more in (("run.name=without",), ("run.name=with", moments, "parallel.zero_stage=1"))
    )
    assert first[0] == pytest.approx(second[0], rel=1e-6)
    assert first[1] != pytest.approx(second[1], rel=1e-5)

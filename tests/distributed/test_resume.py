"""A run that was killed continues as if nothing had happened."""

import random
import shutil

import pytest

from megakernel.config.resume import NOT_FINITE
from tests.distributed.processes import RankFailedError, run_ranks
from tests.distributed.training_run import (
    assert_identical,
    layout,
    pretrain_in_this_rank,
    pretrain_killed_at_line,
    scalars,
    train,
    write_config,
)
from tests.tiers import tiered

STEPS = 6
LAYOUTS = ["dp2", "dp2 zero 1", "dp2 zero 2", "dp2 zero 3", "pp2", "bfloat16 dp2 zero 1"]
OPTIONS = (f"training.steps={STEPS}", "checkpoint.every=2", "logging.tensorboard=false")


@pytest.mark.parametrize("ranks", tiered(LAYOUTS, ["dp2 zero 2"]))
def test_a_run_killed_at_any_step_resumes_bit_identically(ranks, corpus, tmp_path):
    world_size, *overrides = (*layout(ranks), *OPTIONS)
    config = write_config(tmp_path, corpus)
    whole = train(config, world_size, *overrides, "run.name=whole")
    step = random.Random(ranks).randrange(3, STEPS)
    killed = (*overrides, "run.name=killed")
    with pytest.raises(RankFailedError, match="exit status -9"):
        run_ranks(pretrain_killed_at_line, world_size, f"step {step}/", config, killed)
    assert list((tmp_path / "killed/checkpoints").glob("step_*"))
    continued = train(config, world_size, *overrides, "run.name=killed")
    assert_identical(continued, whole)


@pytest.mark.second
@pytest.mark.parametrize("ranks", ["one process", "one process zero 1"])
def test_a_new_learning_rate_of_mechanisms_holds_from_the_next_step_on(ranks, corpus, tmp_path):
    _, *same = layout(ranks)
    config, options = write_config(tmp_path, corpus), ("schedule.name=constant", "logging.tensorboard=false")
    before = (*same, *options, "training.steps=2", "optimizer.mechanism_lr=1e-3")
    train(config, 1, *before)
    recorded = tmp_path / "run/config.yaml"
    recorded.write_text(NOT_FINITE + recorded.read_text())
    for copy in ("reshaped", "unchanged"):
        shutil.copytree(tmp_path / "run", tmp_path / copy)
    after = (*options, "training.steps=4", "optimizer.mechanism_lr=10")
    losses = scalars(train(config, 1, *same, *after), "train/loss")
    # A reshaped run takes only weights and moments from its checkpoint, so its rates are those of its configuration.
    reshaped = train(config, 1, "parallel.zero_stage=2", *after, "run.name=reshaped")
    assert losses == pytest.approx(scalars(reshaped, "train/loss"), rel=1e-5)
    unchanged = train(config, 1, *before, "training.steps=4", "run.name=unchanged")
    assert losses[-1] != pytest.approx(scalars(unchanged, "train/loss")[-1], rel=1e-4)


@pytest.mark.parametrize(("steps", "status"), [(1, 0), (2, 143)])
def test_a_run_that_is_asked_to_stop_in_its_last_step_is_done(steps, status, corpus, tmp_path):
    config, stop_file = write_config(tmp_path, corpus), tmp_path / "run/STOP"
    stop_file.parent.mkdir()
    stop_file.touch()
    overrides = (f"training.steps={steps}", "logging.tensorboard=false")
    assert run_ranks(pretrain_in_this_rank, 1, config, overrides) == [status]
    assert not stop_file.exists()

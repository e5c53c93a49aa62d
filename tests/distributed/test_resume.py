"""A run that was killed continues as if nothing had happened."""

import random

import pytest

from tests.distributed.processes import RankFailedError, run_ranks
from tests.distributed.training_run import (
    assert_identical,
    layout,
    pretrain_killed_at_line,
    train,
    write_config,
)
from tests.tiers import tiered

STEPS = 6
LAYOUTS = ["dp2", "dp2 zero 1", "dp2 zero 2", "dp2 zero 3", "pp2", "bfloat16 dp2 zero 1"]
OPTIONS = (f"training.steps={STEPS}", "checkpoint.every=2", "logging.tensorboard=false")


@pytest.mark.parametrize("ranks", tiered(LAYOUTS, ["dp2 zero 2", "pp2"]))
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

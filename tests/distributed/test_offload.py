"""DeepSpeed's keys that keep optimizer state and weights in host memory."""

import pytest

from tests.distributed.training_run import assert_alike, assert_continued, layout, train, write_config
from tests.tiers import tiered

OPTIMIZER = "deepspeed={zero_optimization: {offload_optimizer: {device: cpu}}}"
BOTH = "deepspeed={zero_optimization: {offload_optimizer: {device: cpu}, offload_param: {device: cpu}}}"
CASES = [
    ("dp2 zero 1", OPTIMIZER),
    ("dp2 zero 2", OPTIMIZER),
    ("tp2 dp2 zero 2", OPTIMIZER),
    ("dp2 zero 2 bfloat16", OPTIMIZER),
    ("dp2 zero 3", BOTH),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory, corpus):
    return write_config(tmp_path_factory.mktemp("offload"), corpus)


@pytest.mark.parametrize(("ranks", "keys"), tiered(CASES, [("dp2 zero 2", OPTIMIZER)]))
def test_offloaded_state_learns_what_state_on_the_device_does(ranks, keys, config):
    short = ("training.steps=2", "schedule.name=constant")
    name = ranks.replace(" ", "_")
    expected = train(config, *layout(ranks), *short, f"run.name=device_{name}")
    assert_alike(train(config, *layout(ranks), *short, keys, f"run.name=host_{name}"), expected)


@pytest.mark.second
@pytest.mark.parametrize(("ranks", "keys"), [CASES[1], CASES[4]])
def test_a_restart_with_offloaded_state_changes_no_bit(ranks, keys, config):
    options = (*layout(ranks), keys, "schedule.name=constant")
    name = ranks.replace(" ", "_")
    whole = train(config, *options, "training.steps=4", f"run.name=whole_{name}")
    train(config, *options, "training.steps=2", f"run.name=halves_{name}")
    assert_continued(train(config, *options, "training.steps=4", f"run.name=halves_{name}"), whole)

"""Training with DeepSpeed's offload of optimizer state and weights to host memory."""

import pytest

from tests.distributed.training_run import assert_losses_close, assert_resumed_bit_identically, layout, train

pytestmark = pytest.mark.second

OFFLOAD_OPTIMIZER = "deepspeed={zero_optimization: {offload_optimizer: {device: cpu}}}"
OFFLOAD_BOTH = (
    "deepspeed={zero_optimization: {offload_optimizer: {device: cpu}, offload_param: {device: cpu}}}"
)
CASES = [
    ("dp2 zero 1", OFFLOAD_OPTIMIZER),
    ("dp2 zero 2", OFFLOAD_OPTIMIZER),
    ("tp2 dp2 zero 2", OFFLOAD_OPTIMIZER),
    ("dp2 zero 2 bfloat16", OFFLOAD_OPTIMIZER),
    ("dp2 zero 3", OFFLOAD_BOTH),
]

SHORT = ("training.steps=2", "schedule.name=constant")


@pytest.fixture(scope="module")
def one_process(config):
    """The losses without offload, on any layout in float32."""
    return train(config, 1, *SHORT)


@pytest.mark.parametrize(("ranks", "keys"), CASES)
def test_offloading_does_not_change_the_losses(ranks, keys, config, one_process):
    name = ranks.replace(" ", "_")
    expected = one_process
    if "bfloat16" in ranks:
        expected = train(config, *layout(ranks), *SHORT, f"run.name=device_{name}")
    assert_losses_close(train(config, *layout(ranks), *SHORT, keys, f"run.name=host_{name}"), expected)


@pytest.mark.parametrize(("ranks", "keys"), [CASES[1], CASES[4]])
def test_a_resume_with_offloaded_state_is_bit_identical(ranks, keys, config):
    options = (*layout(ranks), keys, "schedule.name=constant")
    name = ranks.replace(" ", "_")
    whole = train(config, *options, "training.steps=4", f"run.name=whole_{name}")
    train(config, *options, "training.steps=2", f"run.name=halves_{name}")
    assert_resumed_bit_identically(
        train(config, *options, "training.steps=4", f"run.name=halves_{name}"), whole
    )

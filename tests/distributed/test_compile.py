"""Training with compiled layers (`training.compile: layer`) has the losses of training without."""

import pytest

from tests.distributed.training_run import assert_losses_close, layout, scalars, train, write_config

pytestmark = [pytest.mark.second, pytest.mark.timeout(1800)]  # Inductor takes minutes on a slow machine

OPTIONS = (
    "training.steps=3",
    "model.num_layers=2",
    "model.attention_pattern=null",
    "logging.tensorboard=false",
)


def test_a_compiled_run_has_the_losses_of_one_that_is_not_and_resumes(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    expected = train(config, 1, *OPTIONS, "run.name=eager")
    compiled = (*OPTIONS, "training.compile=layer")
    assert_losses_close(train(config, 1, *compiled, "run.name=compiled"), expected)
    train(config, 2, *layout("dp2 zero 1")[1:], *compiled, "training.steps=2", "run.name=resumed")
    # The resumed run also has the evaluation at its first end.
    losses = scalars(train(config, 2, *layout("tp2")[1:], *compiled, "run.name=resumed"), "train/loss")
    assert losses == pytest.approx(scalars(expected, "train/loss"), rel=1e-5)

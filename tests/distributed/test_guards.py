"""Steps with non-finite gradients change nothing, on any layout."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megakernel.config import RunFailed, load
from tests.distributed.processes import cpu_mesh, run_ranks
from tests.distributed.training_run import layout, train, write_config
from tests.tiers import tiered

LAYOUTS = [
    *("dp2", "dp2 zero 1", "dp2 zero 2", "dp2 zero 3", "tp2", "tp2 zero 1", "pp2", "pp2 zero 1"),
    *("bfloat16 dp2 zero 1", "bfloat16 dp2 zero 2", "bfloat16 dp2 zero 3", "bfloat16 pp2 zero 1"),
]


@contextmanager
def trainer(config: Path, overrides: tuple[str, ...]) -> Iterator[Any]:
    """The trainer of this rank, inside `run_ranks`."""
    from launch.training import providers
    from megakernel.training.trainer import Trainer

    loaded = load(config, overrides)
    with cpu_mesh(**loaded.parallel.model_dump()) as mesh:
        yield Trainer(loaded, mesh, providers())


def multiply_gradient(trainer: Any, value: float) -> Any:
    """Multiply one parameter's gradient on rank 1 alone; returns the hook, whose `remove` undoes it."""
    parameter = next(iter(trainer.engine.engine.module.parameters()))
    factor = value if trainer.mesh.rank == 1 else 1.0
    return parameter.register_hook(lambda gradient: gradient * factor)


@pytest.mark.parametrize("ranks", tiered(LAYOUTS, ["tp2 zero 1"]))
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(ranks, corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    world_size, *overrides = layout(ranks)
    for steps, losses, skipped in run_ranks(train_with_bad_gradients, world_size, config, tuple(overrides)):
        assert [step.skipped for step in steps] == [False, True, True, False]
        assert [math.isfinite(step.grad_norm) for step in steps] == [True, False, False, True]
        assert skipped == 2
        assert losses[0] == losses[1] == losses[2], "a skipped step changed the weights"
        assert losses[3] < losses[0]


def train_with_bad_gradients(config: Path, overrides: tuple[str, ...]) -> tuple[Any, ...]:
    """A healthy step, two with bad gradients, a healthy one; the validation loss after each."""
    with trainer(config, overrides) as local_trainer:
        batches = local_trainer.batches.from_step(0)
        steps, losses = [], []
        for value in (1.0, math.inf, math.nan, 1.0):
            hook = multiply_gradient(local_trainer, value)
            steps.append(local_trainer.engine.train_step(next(batches), 1e-3))
            hook.remove()
            losses.append(local_trainer.engine.evaluate(list(local_trainer.validation))["loss"])
        return steps, losses, local_trainer.engine.skipped_steps


@pytest.mark.second
def test_too_many_skipped_steps_end_the_run_and_keep_the_checkpoint_before_them(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    overrides = ("training.max_skipped_steps=3", "checkpoint.every=2", "checkpoint.keep=1")
    assert len(train(config, 2, *overrides, "training.steps=2")) == 3
    for message in run_ranks(run_with_bad_gradients, 2, config, overrides):
        assert message.startswith("training.max_skipped_steps=3: that many steps in a row")
        assert "training.skip_samples" in message
    checkpoints = tmp_path / "run/checkpoints"
    assert (checkpoints / "latest").read_text() == "step_4", "it holds the weights and moments of step 2"
    assert (checkpoints / "step_2").is_dir(), "the one before the bad steps is kept"
    as_the_message_advises = ("training.skip_samples=[[16, 48]]", "optimizer.lr=5e-4")
    healthy = train(config, 2, *overrides, "training.steps=6", *as_the_message_advises)
    assert [line["step"] for line in healthy] == [0, 1, 2, 3, 4, 5, 6]
    assert [line["train/skipped_steps"] for line in healthy[1:]] == [0, 0, 1, 2, 2, 2]


def run_with_bad_gradients(config: Path, overrides: tuple[str, ...]) -> str:
    with trainer(config, overrides) as local_trainer:
        multiply_gradient(local_trainer, math.nan)
        with pytest.raises(RunFailed) as failure:
            local_trainer.run()
        return str(failure.value)


BFLOAT16 = [name for name in LAYOUTS if "bfloat16" in name]


EIGHT_STEPS = ("training.steps=8", "schedule.name=constant", "optimizer.lr=3e-3", "training.eval_samples=0")


@pytest.fixture(scope="module")
def float32(tmp_path_factory, corpus):
    """A configuration, and the last loss of one process in float32."""
    config = write_config(tmp_path_factory.mktemp("float32"), corpus)
    return config, train(config, 1, *EIGHT_STEPS)[-1]["train/loss"]


@pytest.mark.second
@pytest.mark.parametrize("ranks", BFLOAT16)
def test_bfloat16_trains_like_float32(ranks, float32, tmp_path):
    config, expected = float32
    actual = train(config, *layout(ranks), *EIGHT_STEPS, f"run.root={tmp_path}")
    # bfloat16 has three significant digits; the loss itself falls by a third.
    assert actual[-1]["train/loss"] == pytest.approx(expected, rel=1e-2)
    assert actual[-1]["train/loss"] < 0.9 * actual[0]["train/loss"]

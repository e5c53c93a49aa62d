"""Steps whose gradients are not finite leave no trace, on any layout."""

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


def spoil(trainer: Any, value: float) -> Any:
    """Make one parameter's gradient not finite on rank 1 alone; returns what takes that back."""
    parameter = next(iter(trainer.engine.engine.module.parameters()))
    factor = value if trainer.mesh.rank == 1 else 1.0
    return parameter.register_hook(lambda gradient: gradient * factor)


FIRST = ("dp2 zero 3", "tp2 zero 1", "pp2", "bfloat16 dp2 zero 2")


@pytest.mark.parametrize("ranks", tiered(LAYOUTS, FIRST))
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(ranks, corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    world_size, *overrides = layout(ranks)
    for steps, losses, skipped in run_ranks(around_bad_gradients, world_size, config, tuple(overrides)):
        assert [step.skipped for step in steps] == [False, True, True, False]
        assert [math.isfinite(step.grad_norm) for step in steps] == [True, False, False, True]
        assert skipped == 2
        assert losses[0] == losses[1] == losses[2], "a skipped step changed the weights"
        assert losses[3] < losses[0]


def around_bad_gradients(config: Path, overrides: tuple[str, ...]) -> tuple[Any, ...]:
    """A healthy step, two with bad gradients, a healthy one; the validation loss after each."""
    with trainer(config, overrides) as here:
        batches = here.batches.from_step(0)
        steps, losses = [], []
        for value in (1.0, math.inf, math.nan, 1.0):
            hook = spoil(here, value)
            steps.append(here.engine.train_step(next(batches), 1e-3))
            hook.remove()
            losses.append(here.engine.evaluate(list(here.validation))["loss"])
        return steps, losses, here.engine.skipped_steps


def test_too_many_bad_steps_end_the_run_and_the_newest_checkpoint_is_from_before(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    overrides = ("training.max_skipped_steps=3", "checkpoint.every=2", "checkpoint.keep=1")
    assert len(train(config, 2, *overrides, "training.steps=2")) == 3
    for message in run_ranks(run_with_bad_gradients, 2, config, overrides):
        assert message.startswith("training.max_skipped_steps=3: that many steps in a row")
        assert "training.skip_samples" in message
    checkpoints = tmp_path / "run/checkpoints"
    assert (checkpoints / "latest").read_text() == "step_4", "it holds the weights and moments of step 2"
    assert (checkpoints / "step_2").is_dir(), "the one from before the bad steps"
    as_advised = ("training.skip_samples=[[16, 48]]", "optimizer.lr=5e-4")
    healthy = train(config, 2, *overrides, "training.steps=6", *as_advised)
    assert [line["step"] for line in healthy] == [0, 1, 2, 3, 4, 5, 6]
    assert [line["train/skipped_steps"] for line in healthy[1:]] == [0, 0, 1, 2, 2, 2]


def run_with_bad_gradients(config: Path, overrides: tuple[str, ...]) -> str:
    with trainer(config, overrides) as here:
        spoil(here, math.nan)
        with pytest.raises(RunFailed) as failure:
            here.run()
        return str(failure.value)


BFLOAT16 = [name for name in LAYOUTS if "bfloat16" in name]


@pytest.mark.parametrize("ranks", tiered(BFLOAT16, ["bfloat16 dp2 zero 2"]))
def test_bfloat16_learns_as_float32_does(ranks, corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    options = ("training.steps=8", "schedule.name=constant", "optimizer.lr=3e-3", "training.eval_samples=0")
    expected = train(config, 1, *options, "run.name=float32")[-1]["train/loss"]
    found = train(config, *layout(ranks), *options)
    # Three significant digits of bfloat16; the loss itself falls by a third.
    assert found[-1]["train/loss"] == pytest.approx(expected, rel=1e-2)
    assert found[-1]["train/loss"] < 0.9 * found[0]["train/loss"]

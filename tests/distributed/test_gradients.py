"""In bfloat16 under ZeRO 1, each rank reduces, measures and clips the gradients of its own partition alone."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megakernel.training.gradients import OwnGradients
from tests.distributed.processes import run_ranks
from tests.distributed.test_guards import trainer
from tests.distributed.training_run import layout, write_config

LAYOUTS = ["bfloat16 dp2 zero 1", "bfloat16 dp2 tp2 zero 1", "bfloat16 dp2 pp2 zero 1", "bfloat16 cp2 zero 1"]
ONE_KEY_HEAD = ("model.num_kv_heads=1",)
"""Over two tensor ranks: of what both hold, the norm counts one."""


# With clipping one step: norms that differ in the last bit may round a weight differently, and steps amplify that.
@pytest.mark.second
@pytest.mark.parametrize(
    ("clip_grad_norm", "steps"),
    [(0.1, 1), pytest.param(100.0, 3, marks=pytest.mark.second)],
    ids=["clipped", "not clipped"],
)
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_the_updates_are_those_of_deepspeeds_all_reduce(ranks, clip_grad_norm, steps, corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    world_size, *overrides = layout(ranks)
    arguments = (config, (*overrides, *ONE_KEY_HEAD, f"optimizer.clip_grad_norm={clip_grad_norm}"), steps)
    ours = run_ranks(train_steps, world_size, *arguments, False)
    deepspeeds = run_ranks(train_steps, world_size, *arguments, True)
    for (norms, tensors), (expected_norms, expected_tensors) in zip(ours, deepspeeds):
        assert (min(norms) > clip_grad_norm) == (clip_grad_norm < 1)
        assert norms == pytest.approx(expected_norms, rel=1e-6)
        for found, expected in zip(tensors, expected_tensors, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_sums_of_gradients_are_bit_equal_to_deepspeeds(corpus, tmp_path):
    """Over micro-batches and steps, for weights that one of the steps does not use, too."""
    config = write_config(tmp_path, corpus)
    (ours,), (deepspeeds,) = (run_ranks(sums_of_steps, 1, config, stock) for stock in (False, True))
    assert len(ours) == len(deepspeeds) == 3
    for found, expected in zip(ours, deepspeeds, strict=True):
        assert [x.dtype for x in found] == [torch.float32] * len(expected)
        assert all(map(torch.equal, found, expected))
        assert all(x.any() for x in found)


def sums_of_steps(config: Path, by_deepspeed: bool) -> list[list[torch.Tensor]]:
    """The flat float32 sums of each of three steps of four micro-batches, before clipping."""
    stock = patch.object(OwnGradients, "install") if by_deepspeed else nullcontext()
    _, *overrides = layout("bfloat16 one process zero 1")
    found: list[list[torch.Tensor]] = []
    with stock, trainer(config, tuple(overrides)) as local:
        engine, batches = local.engine, local.batches.from_step(0)
        sums = engine.engine.optimizer.fp32_groups_gradients_flat
        unused = next(x for name, x in engine.engine.module.named_parameters() if "pool_keys" in name)
        for step in range(3):
            unused.requires_grad_(step != 1)
            with engine.before_update(lambda: found.append([x.clone() for x in sums])):
                engine.train_step(next(batches), 1e-3)
        assert engine.micro_batches == 4
    return found


def train_steps(
    config: Path, overrides: tuple[str, ...], steps: int, by_deepspeed: bool
) -> tuple[list[float], list[Any]]:
    """The gradient norm of each step; then this rank's float32 weights and the optimizer's first moments."""
    stock = patch.object(OwnGradients, "install") if by_deepspeed else nullcontext()
    with stock, trainer(config, overrides) as local:
        batches, norms, engine = local.batches.from_step(0), [], local.engine.engine
        for _ in range(steps):
            norms.append(local.engine.train_step(next(batches), 1e-3).grad_norm)
            kept = [weight for weight in engine.module.parameters() if weight.grad is not None]
            assert not kept, "gradients in bfloat16 stay in memory beside their float32 sums"
        weights = engine.optimizer.fp32_groups_flat_partition
        moments = [local.engine.optimizer.state[part]["exp_avg"] for part in weights]
        return norms, [x.detach().clone() for x in (*weights, *moments)]

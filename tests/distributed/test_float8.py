"""Runs with float8 products: close to bfloat16, alike on data-parallel ranks, and continued bit for bit."""

import pytest

from tests.distributed.training_run import (
    assert_resumed_bit_identically,
    layout,
    metrics,
    scalars,
    train,
    write_config,
)
from tests.tiers import tiered

BFLOAT16 = ("training.dtype=bfloat16", "parallel.zero_stage=1", "training.steps=4")


@pytest.fixture(scope="module")
def in_bfloat16(tmp_path_factory, corpus):
    """The configuration, and the losses of its run without float8."""
    config = write_config(tmp_path_factory.mktemp("one"), corpus)
    return config, scalars(train(config, 1, *BFLOAT16), "train/loss")


@pytest.fixture(scope="module")
def one_process(in_bfloat16):
    """Scaling -> losses of one process."""
    config, _ = in_bfloat16
    return {
        scaling: scalars(
            train(config, 1, *BFLOAT16, f"training.fp8={scaling}", f"run.name={scaling}"), "train/loss"
        )
        for scaling in ("tensorwise", "rowwise")
    }


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_losses_are_those_of_bfloat16_but_for_rounding(scaling, in_bfloat16, one_process):
    plain, found = in_bfloat16[1], one_process[scaling]
    assert found == pytest.approx(plain, abs=0.02)
    assert found != plain
    # Evaluations stay in bfloat16, so before the first step they are equal.
    runs = [in_bfloat16[0].parent / name for name in ("run", scaling)]
    first, second = (scalars(metrics(run), "eval/loss")[0] for run in runs)
    assert first == second


LAYOUTS = ["dp2 zero 1", "dp2 zero 2", "tp2", "tp2 sequence parallel", "pp2", "cp2", "full recompute"]


@pytest.mark.parametrize("ranks", tiered(LAYOUTS, ["tp2 sequence parallel"]))
def test_other_layouts_have_the_losses_of_one_process_but_for_rounding(
    ranks, in_bfloat16, one_process, tmp_path
):
    size, *overrides = layout(ranks)
    lines = train(in_bfloat16[0], size, *BFLOAT16, *overrides, "training.fp8=rowwise", f"run.root={tmp_path}")
    assert scalars(lines, "train/loss") == pytest.approx(one_process["rowwise"], abs=0.02)


@pytest.mark.second
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(in_bfloat16, tmp_path):
    config, _ = in_bfloat16
    options = (*BFLOAT16, "training.fp8=tensorwise", "schedule.decay_steps=2")
    whole = train(config, 1, *options, f"run.root={tmp_path}/whole")
    parts = (f"run.root={tmp_path}/parts", "checkpoint.every=2")
    train(config, 1, *options, *parts, "training.steps=2")
    assert_resumed_bit_identically(train(config, 1, *options, *parts), whole)

"""Learned kernels, whose noise is redrawn as they train: layouts and restarts do not change the numbers."""

import pytest

from tests.distributed.training_run import assert_alike, layout, scalars, train, write_config
from tests.tiers import tiered

MODEL = [
    "model.attention={preset: gmm_rks, feature_map: {smoothing: 1.0, resample_every: 2}}",
    "model.attention_pattern=[main, "
    "{preset: generative_prf, feature_map: {resample_every: 2}}, "
    "{preset: fastfood_rks, feature_map: {smoothing: 1.0}}, "
    "{preset: flurka, compression: {block_size: 16, rank: 4}, feature_map: {name: gmm_prf, resample_every: 2}}]",
    "schedule.name=constant",
    "training.micro_batch_size=4",
]
"""Every learned kernel in a layer, with three draws of noise in the five steps, whatever their number."""

LAYOUTS = [
    *("tp2", "cp2", "tp2 pp2 selective recompute", "dp2 zero 3", "dp2 zero 1 full recompute"),
]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("one")
    return write_config(folder, corpus), train(write_config(folder, corpus), 1, *MODEL)


@pytest.mark.parametrize("ranks", tiered(LAYOUTS, ["tp2", "cp2", "dp2 zero 3"]))
def test_layout_gives_the_losses_of_one_process(ranks, one_process, tmp_path):
    config, expected = one_process
    found = train(config, *layout(ranks), *MODEL, f"run.root={tmp_path}")
    assert_alike(found, expected)


@pytest.mark.parametrize("step", tiered([3, 4], [4]))
def test_a_restart_between_and_at_a_redraw_changes_no_bit(step, one_process, tmp_path):
    config, expected = one_process
    here = [*MODEL, f"run.root={tmp_path}"]
    train(config, 1, *here, f"training.steps={step}")
    continued = train(config, 1, *here)
    for tag in ("train/loss", "train/grad_norm"):
        assert scalars(continued, tag) == scalars(expected, tag), tag
    assert scalars(continued, "eval/loss")[-1] == scalars(expected, "eval/loss")[-1]

"""Layers with mixture keys train alike on any layout, and what an M-step learns is the same on every process."""

import pytest

from tests.distributed.training_run import assert_alike, layout, scalars, train, write_config
from tests.tiers import tiered

KINDS = (
    "model.attention=mgk model.num_layers=6 model.num_kv_heads=2 model.attention_pattern=["
    "main,{preset: smgk, mixture: {m_step: true}},{preset: mlk, feature_map: {name: favor}},"
    "{preset: mgk, similarity: softmax, mixture: {estep: hard}},"
    "{preset: flurka, compression: {block_size: 16, rank: 4}, mixture: {}},"
    "{preset: flurka_kernel, compression: {block_size: 16, rank: 4}, mixture: {kind: shifted}}]"
)

LAYOUTS = ["tp2", "cp2", "tp2 cp2", "dp2 zero 2", "dp2 zero 3", "pp2 full recompute"]


def kinds() -> list[str]:
    head, pattern = KINDS.split(" model.attention_pattern=")
    return [*head.split(), f"model.attention_pattern={pattern}"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("one")
    config = write_config(folder, corpus)
    return config, train(config, 1, *kinds(), "training.steps=3")


@pytest.mark.parametrize("ranks", tiered(LAYOUTS, ["tp2 cp2"]))
def test_layout_gives_the_losses_of_one_process(ranks, one_process, tmp_path):
    config, expected = one_process
    found = train(config, *layout(ranks), *kinds(), "training.steps=3", f"run.root={tmp_path}")
    assert_alike(found, expected)


def test_losses_fall(one_process):
    losses = scalars(one_process[1], "train/loss")
    assert losses[-1] < losses[0]

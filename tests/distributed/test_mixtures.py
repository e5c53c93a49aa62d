"""Layers with mixture keys train alike on any layout, and what an M-step learns is the same on every process."""

import pytest

from tests.distributed.training_run import assert_alike, scalars, train, write_config
from tests.tiers import tiered

KINDS = (
    "model.attention=mgk model.num_layers=6 model.num_kv_heads=2 model.attention_pattern=["
    "main,{preset: smgk, mixture: {m_step: true}},{preset: mlk, feature_map: {name: favor}},"
    "{preset: mgk, similarity: softmax, mixture: {estep: hard}},"
    "{preset: flurka, compression: {block_size: 16, rank: 4}, mixture: {}},"
    "{preset: flurka_kernel, compression: {block_size: 16, rank: 4}, mixture: {kind: shifted}}]"
)

LAYOUTS = {
    "tp2": (2, "parallel.tensor=2"),
    "cp2": (2, "parallel.context=2"),
    "tp2 cp2": (4, "parallel.tensor=2 parallel.context=2"),
    "dp2 zero 2": (2, "parallel.zero_stage=2"),
    "dp2 zero 3": (2, "parallel.zero_stage=3"),
    "pp2 full recompute": (2, "parallel.pipeline=2 training.activation_checkpointing=full"),
}


def kinds() -> list[str]:
    head, pattern = KINDS.split(" model.attention_pattern=")
    return [*head.split(), f"model.attention_pattern={pattern}"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("one")
    config = write_config(folder, corpus)
    return config, train(config, 1, *kinds(), "training.steps=3")


@pytest.mark.parametrize("layout", tiered(LAYOUTS, ["tp2 cp2"]))
def test_layout_gives_the_losses_of_one_process(layout, one_process, tmp_path):
    config, expected = one_process
    world_size, overrides = LAYOUTS[layout]
    changes = ["training.steps=3", *overrides.split(), f"run.root={tmp_path}"]
    found = train(config, world_size, *kinds(), *changes)
    assert_alike(found, expected)


def test_losses_fall(one_process):
    losses = scalars(one_process[1], "train/loss")
    assert losses[-1] < losses[0]

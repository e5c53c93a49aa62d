"""Any layout of the same global batch gives the losses of one process."""

from functools import cache

import pytest

from tests.distributed.training_run import assert_alike, train, write_config
from tests.tiers import tiered

LAYOUTS = {
    "dp2": (2, ""),
    "tp2": (2, "parallel.tensor=2"),
    "tp2 sequence parallel": (2, "parallel.tensor=2 parallel.sequence_parallel=true"),
    "cp2": (2, "parallel.context=2"),
    "cp4": (4, "parallel.context=4"),
    "cp8, a block and half a head each": (8, "parallel.context=8"),
    "cp4 states passed on": (4, "parallel.context=4 parallel.state_exchange=ring"),
    "cp2 ring selective recompute": (
        2,
        "parallel.context=2 parallel.softmax_exchange=ring training.activation_checkpointing=selective",
    ),
    "cp4 full recompute": (4, "parallel.context=4 training.activation_checkpointing=full"),
    "pp2": (2, "parallel.pipeline=2"),
    "tp2 cp2": (4, "parallel.tensor=2 parallel.context=2"),
    "tp2 pp2": (4, "parallel.tensor=2 parallel.pipeline=2"),
    "tp2 sequence parallel pp2": (
        4,
        "parallel.tensor=2 parallel.sequence_parallel=true parallel.pipeline=2",
    ),
    "cp2 pp2": (4, "parallel.context=2 parallel.pipeline=2"),
    "tp2 cp2 dp2": (8, "parallel.tensor=2 parallel.context=2"),
    "dp2 zero 1": (2, "parallel.zero_stage=1"),
    "dp2 zero 2": (2, "parallel.zero_stage=2"),
    "dp2 zero 3": (2, "parallel.zero_stage=3"),
    "tp2 dp2 zero 1": (4, "parallel.tensor=2 parallel.zero_stage=1"),
    "cp2 dp2 zero 2": (4, "parallel.context=2 parallel.zero_stage=2"),
    "cp2 zero 3": (2, "parallel.context=2 parallel.zero_stage=3"),
    "tp2 sequence parallel cp2 zero 3": (
        4,
        "parallel.tensor=2 parallel.sequence_parallel=true parallel.context=2 parallel.zero_stage=3",
    ),
    "pp2 dp2 zero 1": (4, "parallel.pipeline=2 parallel.zero_stage=1"),
    "dp2 full recompute": (2, "training.activation_checkpointing=full"),
    "tp2 selective recompute": (2, "parallel.tensor=2 training.activation_checkpointing=selective"),
    "dp2 loss chunks": (2, "training.loss_chunk_size=100"),
    "tp2 sequence parallel mlp chunks": (
        2,
        "parallel.tensor=2 parallel.sequence_parallel=true training.mlp_chunk_size=50",
    ),
    "cp2 zero 3 full recompute mlp chunks": (
        2,
        "parallel.context=2 parallel.zero_stage=3 training.activation_checkpointing=full training.mlp_chunk_size=50",
    ),
    "pp2 full recompute offload": (
        2,
        "parallel.pipeline=2 training.activation_checkpointing=full training.checkpoint_offload=true",
    ),
    "cp2 full recompute offload mlp chunks": (
        2,
        "parallel.context=2 training.activation_checkpointing=full training.checkpoint_offload=true "
        "training.mlp_chunk_size=50",
    ),
    "one process, one micro-batch": (1, "training.micro_batch_size=8"),
}

OTHER_PARTS = (
    "model.tie_embeddings=false model.position=learned model.activation=gelu model.norm=layernorm "
    "model.bias=true model.qkv_bias=true model.num_kv_heads=2"
)
"""The parts that the default model has not, where they meet tensor ranks and stages."""

SIX_HEADS = "model.hidden_size=96 model.num_heads=6 model.num_kv_heads=2"
"""Heads that divide over neither four context ranks nor, on each of two tensor ranks, over two."""

VARIANTS = {
    "tied rope swiglu rmsnorm": ("", list(LAYOUTS)),
    "untied learned gelu layernorm biases": (
        OTHER_PARTS,
        [
            "tp2",
            "tp2 sequence parallel",
            "cp4",
            "pp2",
            "tp2 cp2 dp2",
            "tp2 sequence parallel pp2",
            "dp2 zero 3",
        ],
    ),
    "six heads": (
        SIX_HEADS,
        ["cp4 states passed on", "cp4 full recompute", "tp2 cp2", "tp2 sequence parallel cp2 zero 3"],
    ),
}
LONG = [(variant, layout, 5) for variant, (_, layouts) in VARIANTS.items() for layout in layouts]
FIRST = {
    "tied rope swiglu rmsnorm": (
        "cp2 ring selective recompute",
        "cp2 pp2",
        "tp2 dp2 zero 1",
        "cp2 dp2 zero 2",
        "pp2 dp2 zero 1",
        "dp2 full recompute",
        "tp2 sequence parallel mlp chunks",
        "pp2 full recompute offload",
        "one process, one micro-batch",
    ),
    "untied learned gelu layernorm biases": ("cp4", "tp2 sequence parallel pp2", "dp2 zero 3"),
    "six heads": ("cp4 states passed on", "tp2 cp2"),
}
"""Of the first tier: every way to share out a model with every other, and each option once, for two steps."""
SHORT = [(variant, layout, 2) for variant, layouts in FIRST.items() for layout in layouts]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, corpus):
    """A variant's configuration and what one process measures in so many steps."""

    @cache
    def measured(variant, steps):
        config = write_config(tmp_path_factory.mktemp("one"), corpus)
        return config, train(config, 1, *VARIANTS[variant][0].split(), f"training.steps={steps}")

    return measured


@pytest.mark.parametrize(("variant", "layout", "steps"), tiered([*SHORT, *LONG], SHORT))
def test_layout_gives_the_losses_of_one_process(variant, layout, steps, one_process, tmp_path):
    config, expected = one_process(variant, steps)
    world_size, overrides = LAYOUTS[layout]
    changes = f"{VARIANTS[variant][0]} {overrides} training.steps={steps} run.root={tmp_path}"
    found = train(config, world_size, *changes.split())
    assert_alike(found, expected)

"""Any layout of the same global batch gives the losses of one process."""

from functools import cache

import pytest

from tests.distributed.training_run import assert_alike, layout, train, write_config
from tests.tiers import tiered

LAYOUTS = [
    "dp2",
    "tp2",
    "tp2 sequence parallel",
    "cp2",
    "cp4",
    "cp8",  # a block and half a head each
    "cp4 states passed on",
    "cp2 ring selective recompute",
    "cp4 full recompute",
    "pp2",
    "tp2 cp2",
    "tp2 pp2",
    "tp2 sequence parallel pp2",
    "cp2 pp2",
    "tp2 cp2 dp2",
    "dp2 zero 1",
    "dp2 zero 2",
    "dp2 zero 3",
    "tp2 dp2 zero 1",
    "cp2 dp2 zero 2",
    "cp2 zero 3",
    "tp2 sequence parallel cp2 zero 3",
    "pp2 dp2 zero 1",
    "dp2 full recompute",
    "tp2 selective recompute",
    "dp2 loss chunks",
    "tp2 sequence parallel mlp chunks",
    "cp2 zero 3 full recompute mlp chunks",
    "pp2 full recompute offload",
    "cp2 full recompute offload mlp chunks",
    "one process one micro-batch",
]

OTHER_PARTS = (
    "model.tie_embeddings=false model.position=learned model.activation=gelu model.norm=layernorm "
    "model.bias=true model.qkv_bias=true model.num_kv_heads=2"
)
"""The parts that the default model has not, where they meet tensor ranks and stages."""

SIX_HEADS = "model.hidden_size=96 model.num_heads=6 model.num_kv_heads=2"
"""Heads that divide over neither four context ranks nor, on each of two tensor ranks, over two."""

VARIANTS = {
    "tied rope swiglu rmsnorm": ("", LAYOUTS),
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
LONG = [(variant, name, 5) for variant, (_, names) in VARIANTS.items() for name in names]
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
        "one process one micro-batch",
    ),
    "untied learned gelu layernorm biases": ("cp4", "tp2 sequence parallel pp2", "dp2 zero 3"),
    "six heads": ("cp4 states passed on", "tp2 cp2"),
}
"""Of the first tier: every way to share out a model with every other, and each option once, for two steps."""
SHORT = [(variant, name, 2) for variant, names in FIRST.items() for name in names]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, corpus):
    """A variant's configuration and what one process measures in so many steps."""

    @cache
    def measured(variant, steps):
        config = write_config(tmp_path_factory.mktemp("one"), corpus)
        return config, train(config, 1, *VARIANTS[variant][0].split(), f"training.steps={steps}")

    return measured


@pytest.mark.parametrize(("variant", "ranks", "steps"), tiered([*SHORT, *LONG], SHORT))
def test_layout_gives_the_losses_of_one_process(variant, ranks, steps, one_process, tmp_path):
    config, expected = one_process(variant, steps)
    changes = f"{VARIANTS[variant][0]} training.steps={steps} run.root={tmp_path}"
    found = train(config, *layout(ranks), *changes.split())
    assert_alike(found, expected)

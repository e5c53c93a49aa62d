"""Any layout has the losses of one process for the same global batch."""

import math
from functools import cache

import pytest

from tests.distributed.training_run import (
    assert_losses_close,
    assert_resumed_bit_identically,
    layout,
    scalars,
    train,
    write_config,
)
from tests.tiers import tiered

LAYOUTS = [
    "dp2",
    "tp2",
    "tp2 sequence parallel",
    "cp2",
    "cp4",
    "cp8",  # a block and half a head per rank
    "cp4 states passed on",
    "cp2 ring selective recompute",
    "cp4 full recompute",
    "pp2",
    "pp4",  # stages between the two that share a tied embedding
    "tp2 cp2",
    "tp2 pp2",
    "tp2 sequence parallel pp2",
    "cp2 pp2",
    "tp2 cp2 dp2",
    "dp2 zero 1",
    "dp2 zero 2",
    "dp2 zero 3",
    *("tp2 dp2 zero 1", "tp2 dp2 zero 2", "tp2 dp2 zero 3"),
    *("cp2 dp2 zero 1", "cp2 dp2 zero 2"),
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
    *(
        "model.tie_embeddings=false",
        "model.position=learned",
        "model.activation=gelu",
        "model.norm=layernorm",
    ),
    *("model.bias=true", "model.qkv_bias=true", "model.num_kv_heads=2"),
)
"""Parts that the default model lacks, over tensor ranks and pipeline stages."""

SIX_HEADS = ("model.hidden_size=96", "model.num_heads=6", "model.num_kv_heads=2")
"""Heads that do not divide over four context ranks, nor over two with two tensor ranks."""

Z_LOSS = ("training.z_loss=0.01", "optimizer.decay_embeddings=false", "optimizer.weight_decay=10")
"""A coefficient and a decay that change the second loss by far more than rounding."""

MIXTURES = (
    *("model.attention=mgk", "model.num_layers=6", "model.num_kv_heads=2"),
    "model.attention_pattern=[main, {preset: smgk, mixture: {m_step: true}}, {preset: mlk, feature_map: {name: favor}},"
    "{preset: mgk, similarity: softmax, mixture: {estep: hard}},"
    "{preset: flurka, compression: {block_size: 16, rank: 4}, mixture: {}},"
    "{preset: flurka_kernel, compression: {block_size: 16, rank: 4}, mixture: {kind: shifted}}]",
)
"""Layers with mixture keys; what an M-step learns is the same on every process."""

LEARNED_KERNELS = (
    "model.attention={preset: gmm_rks, feature_map: {smoothing: 1.0, resample_every: 2}}",
    "model.attention_pattern=[main, {preset: generative_prf, feature_map: {resample_every: 2}}, "
    "{preset: fastfood_rks, feature_map: {smoothing: 1.0}}, "
    "{preset: flurka, compression: {block_size: 16, rank: 4}, feature_map: {name: gmm_prf, resample_every: 2}}]",
    *("schedule.name=constant", "training.micro_batch_size=4"),
)
"""Every learned kernel in a layer; the noise is drawn three times in five steps, on any layout."""

DENSE_PARTS = (
    *("model.qk_norm=true", "model.qk_norm_width=all", "model.norm_placement=both", "model.mlp_bias=true"),
    *("model.zero_centered_norm=true", "model.activation=geglu_tanh", "model.num_kv_heads=2"),
    *("model.embedding_multiplier=8", "model.attention_multiplier=0.3", "model.residual_multiplier=0.5"),
    *("model.logits_scaling=0.5", "model.final_logit_softcapping=4", "model.rope_pattern=[main, none]"),
    *("model.attention={preset: softmax, softcap: 1.0}", "model.attention_pattern=[main, flurka]"),
)
"""Parts that families of dense checkpoints have and Llama lacks."""

RECURRENT = (
    *("model.attention=mamba2", "model.num_layers=3", "model.num_kv_heads=2", "model.position=none"),
    "model.attention_pattern=[main, gated_deltanet, {preset: flurka, compression: {block_size: 16, rank: 4},"
    "short_convolution: 3, output_norm: true, output_gate: sigmoid, far_decay: gate}]",
)
"""Decaying states and the delta rule, with the convolutions, norms and gates of a layer around its mechanism."""

FEW_KEY_HEADS = (
    *("model.num_layers=5", "model.qkv_bias=true", "model.qk_norm=true", "model.qk_norm_width=all"),
    "model.attention={preset: flurka, compression: {block_size: 16, rank: 4, per_head: true},"
    "feature_map: {name: hedgehog}, far_decay: gate}",
    "model.attention_pattern=[main, softmax, {preset: gated_deltanet, short_convolution: 3, output_gate: silu},"
    "{preset: smgk, mixture: {m_step: true}}, {preset: gmm_rks, feature_map: {smoothing: 1.0}}]",
)
"""Layers with everything that key heads own, which some tensor ranks copy and others share."""

DROPOUT = ("model.dropout={attention: 0.1, residual: 0.2, embedding: 0.1}",)

VARIANTS = {
    "tied rope swiglu rmsnorm": ((), LAYOUTS),
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
    "parts of dense families": (
        DENSE_PARTS,
        ["tp2 sequence parallel", "tp2 cp2", "tp2 dp2 zero 1", "pp2", "dp2 zero 3", "dp2 loss chunks"],
    ),
    "z-loss and plain embeddings": (
        Z_LOSS,
        ["dp2 zero 1", "tp2 pp2", "tp2 sequence parallel cp2 zero 3", "pp2 dp2 zero 1", "dp2 loss chunks"],
    ),
    "dropout": (
        DROPOUT,
        [
            *("dp2", "tp2", "cp2", "pp2", "dp2 zero 1", "dp2 zero 2", "one process one micro-batch"),
            "tp2 sequence parallel pp2",
            "tp2 sequence parallel cp2 zero 3",
            "tp2 sequence parallel mlp chunks",
            "cp2 ring selective recompute",
            "cp2 zero 3 full recompute mlp chunks",
            "tp2 cp2 dp2",
            "pp2 full recompute offload",
        ],
    ),
    "six heads": (
        SIX_HEADS,
        ["cp4 states passed on", "cp4 full recompute", "tp2 cp2", "tp2 sequence parallel cp2 zero 3"],
    ),
    "mixtures": (MIXTURES, ["tp2", "cp2", "tp2 cp2", "dp2 zero 2", "dp2 zero 3", "pp2 full recompute"]),
    "learned kernels": (
        LEARNED_KERNELS,
        ["tp2", "cp2", "tp2 pp2 selective recompute", "dp2 zero 3", "dp2 zero 1 full recompute"],
    ),
    "recurrent": (
        RECURRENT,
        [
            "tp2 sequence parallel",
            "cp4 states passed on",
            "tp2 cp2",
            "tp2 sequence parallel cp2 zero 3",
            "pp2 dp2 zero 1",
        ],
    ),
    "one key head": (
        (*FEW_KEY_HEADS, "model.num_kv_heads=1"),
        ["tp2 sequence parallel cp2 zero 3", "tp2 pp2 full recompute", "tp4", "tp2 dp2 zero 1"],
    ),
    "two key heads": (
        (*FEW_KEY_HEADS, "model.num_kv_heads=2"),
        ["tp4 sequence parallel", "tp4 zero 1", "tp2 cp2"],
    ),
}
FIRST_TIER = {
    "tied rope swiglu rmsnorm": (
        "cp2 ring selective recompute",
        "tp2 dp2 zero 1",
        "pp2 full recompute offload",
    ),
    "dropout": ("cp2 zero 3 full recompute mlp chunks",),
    "one key head": ("tp2 sequence parallel cp2 zero 3",),
}
"""The first tier: every parallelism, with the model of the demo, with one that differs from it, and with dropout."""
CASES, FIRST_CASES = (
    [(variant, name) for variant, names in tier.items() for name in names]
    for tier in ({variant: names for variant, (_, names) in VARIANTS.items()}, FIRST_TIER)
)


def steps_of(variant):
    """Two steps: the second loss depends on the first update, the evaluation on one with moments of two steps."""
    # Enough steps for an M-step to matter, and for noise to be drawn again.
    return 5 if variant in ("mixtures", "learned kernels", "one key head", "two key heads") else 2


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, corpus):
    """Variant -> the configuration and the metrics of one process."""

    @cache
    def measured(variant):
        config = write_config(tmp_path_factory.mktemp("one"), corpus)
        return config, train(config, 1, *VARIANTS[variant][0], f"training.steps={steps_of(variant)}")

    return measured


@pytest.mark.parametrize(("variant", "ranks"), tiered(CASES, FIRST_CASES))
def test_every_layout_has_the_losses_of_one_process(variant, ranks, one_process, tmp_path):
    config, expected = one_process(variant)
    changes = (*VARIANTS[variant][0], f"training.steps={steps_of(variant)}", f"run.root={tmp_path}")
    actual = train(config, *layout(ranks), *changes)
    assert_losses_close(actual, expected)


@pytest.mark.second
def test_the_z_loss_is_logged_apart_and_lowers_the_logits(one_process):
    plain = one_process("tied rope swiglu rmsnorm")[1]
    _, with_z = one_process("z-loss and plain embeddings")
    assert scalars(with_z, "train/loss")[0] == scalars(plain, "train/loss")[0]
    assert scalars(plain, "train/z_loss") == []
    # A new model's logits are nearly 0, so log(sum(exp(logits))) is nearly the log of the vocabulary.
    vocab_size = 257
    first, second = scalars(with_z, "train/z_loss")
    assert first == pytest.approx(0.01 * math.log(vocab_size) ** 2, rel=0.01)
    assert second < first
    assert scalars(with_z, "eval/loss") != scalars(plain, "eval/loss")


@pytest.mark.second
def test_mixture_keys_lower_the_loss(one_process):
    losses = scalars(one_process("mixtures")[1], "train/loss")
    assert losses[-1] < losses[0]


@pytest.mark.second
@pytest.mark.parametrize("steps", [3, 4])
def test_a_resume_at_or_between_redraws_of_the_noise_is_bit_identical(steps, one_process, tmp_path):
    config, expected = one_process("learned kernels")
    options = (*LEARNED_KERNELS, f"run.root={tmp_path}")
    train(config, 1, *options, f"training.steps={steps}")
    assert_resumed_bit_identically(train(config, 1, *options), expected)

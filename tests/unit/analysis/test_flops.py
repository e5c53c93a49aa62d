import itertools

import pytest

from megakernel.config import PRESETS, Attention, FeatureMap, Model
from megakernel.config.attention import expand_preset
from megakernel.config.mechanisms import mean_complete_blocks, mean_local_keys
from megakernel.model.flops import (
    attention_flops,
    flops_per_token,
    forward_flops,
    training_flops_per_token,
)


def model(**changes) -> Model:
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "ffn_hidden_size": 100}
    return Model.model_validate({**sizes, "attention": "softmax", **changes})


def core(attention, seq_len=256, **changes) -> dict[str, float]:
    built = model(attention=attention, **changes)
    return attention_flops(built, built.attention, seq_len)


@pytest.mark.parametrize(
    ("seq_len", "block", "blocks"),
    itertools.product([1, 7, 8, 9, 16, 37], [1, 8, 64], [1, 2]),
)
def test_mean_local_keys_equals_a_count_of_allowed_pairs(seq_len, block, blocks):
    pairs = sum(
        key <= query and query // block - key // block < blocks
        for query in range(seq_len)
        for key in range(seq_len)
    )
    assert mean_local_keys(seq_len, block, blocks) == pairs / seq_len


def test_flops_of_a_small_softmax_model():
    assert forward_flops(model(), seq_len=9, vocab_size=50) == {
        "projections": 2 * (2 * 64 * 64 * 4),
        "near": 2 * 4 * 5 * (2 * 16 + 2 * 16),  # 5 = (9 + 1) / 2 keys, scores and weighted values
        "mlp": 2 * (2 * 64 * 100 * 3),
        "head": 2 * 64 * 50,
    }


def test_grouped_queries_reduce_projections_and_state_but_not_the_readout():
    all_heads, grouped = core("linear"), core("linear", num_kv_heads=2)
    assert grouped["state"] == all_heads["state"] / 2
    assert grouped["readout"] == all_heads["readout"]
    projections = forward_flops(model(num_kv_heads=2), 8, 8)["projections"]
    assert projections == 2 * 2 * 64 * 16 * (4 + 2 + 2 + 4)


def test_flops_of_feature_maps():
    # 4 heads of 16; hedgehog has a matrix of 16 x 16; linear attention has none.
    assert core("hedgehog")["feature_map"] == 8 * 2 * 16 * 16
    assert core("linear")["feature_map"] == 0
    # 16 samples of 2 Gaussians; one block of 16: 3 products with diagonals and 2 transforms in 4 levels of sums.
    assert core("gmm_rks")["feature_map"] == 8 * 2 * 16 * 32
    assert core("fastfood_rks")["feature_map"] == 8 * (3 * 16 + 2 * 4 * 16)


@pytest.mark.parametrize(
    ("feature_map", "width"),
    [
        ({"name": "elu"}, 16),
        ({"name": "hedgehog"}, 32),
        ({"name": "favor"}, 32),
        ({"name": "favor", "samples": 48}, 48),
        ({"name": "rff"}, 33),
        ({"name": "rff", "smoothing": 0.0}, 32),
        ({"name": "gmm_rks"}, 65),
        ({"name": "gmm_prf", "components": 3, "samples": 8}, 24),
        ({"name": "fastfood_rks"}, 33),
        ({"name": "generative_prf"}, 32),
    ],
)
def test_feature_widths(feature_map, width):
    assert FeatureMap.model_validate(feature_map).width(16) == width


QUADRATIC = [name for name in PRESETS if Attention(**expand_preset(name)).weighs_every_pair]
ATTENDS_EVERY_BLOCK = ["eva", "flurka_eva", "linformer_causal", "selected", "flurka_selected"]
"""Mechanisms of quadratic cost divided by the size of a chunk or block."""
LOGARITHMIC = ["informer"]


@pytest.mark.parametrize(
    "preset", [name for name in PRESETS if name not in (*QUADRATIC, *ATTENDS_EVERY_BLOCK, *LOGARITHMIC)]
)
def test_flops_per_token_of_linear_mechanisms_do_not_grow_with_length(preset):
    short, long = (flops_per_token(model(attention=preset), n, 256) for n in (8192, 2**20))
    # Costs per sequence, such as an inverse, are divided by its tokens.
    assert long == short or (long < short and Attention(**expand_preset(preset)).mixes_future_tokens)


def test_flops_per_token_of_informer_grow_with_the_logarithm_of_the_length():
    short, long = (core("informer", n, kind="masked_lm") for n in (8192, 2**20))
    # ln 8192 is 9.01, and ln 2^20 is 13.9.
    assert all(long[part] == short[part] / 10 * 14 for part in ("samples", "chosen"))


@pytest.mark.parametrize("preset", QUADRATIC)
def test_flops_per_token_of_quadratic_mechanisms_grow_in_proportion_to_length(preset):
    # A causal model has half of the pairs, and the pairs of a token with itself.
    assert core(preset, 4095)["near"] == 2 * core(preset, 2047)["near"]


def test_each_key_of_a_mixture_adds_products_and_a_projection():
    one, two = core("gaussian"), core("mgk")
    assert two["near"] == 1.5 * one["near"]
    mgk, smgk = (forward_flops(model(attention=name), 256, 8)["projections"] for name in ("mgk", "smgk"))
    assert mgk == 1.25 * smgk
    mlk, linear = core("mlk"), core("linear")
    assert (mlk["state"], mlk["readout"]) == (linear["state"], linear["readout"])


def test_shifted_keys_of_flurka_are_pooled_once():
    one, two = core("flurka"), core({"preset": "flurka", "mixture": {}})
    shifted = core({"preset": "flurka", "mixture": {"kind": "shifted"}})
    assert shifted == two | {"landmarks": one["landmarks"]}


def test_layers_of_a_pattern_count_with_their_own_attention():
    mixed = model(num_layers=4, attention="flurka", attention_pattern=["main", "main", "main", "softmax"])
    parts, flurka, softmax = forward_flops(mixed, 256, 8), core("flurka"), core("softmax")
    assert parts["near"] == 3 * flurka["near"] + softmax["near"]
    assert parts["readout"] == 3 * flurka["readout"]


def test_training_costs_three_forwards():
    small = model(attention="flurka")
    assert training_flops_per_token(small, 256, 50) == 3 * flops_per_token(small, 256, 50)


def test_flops_of_linformer_and_flurka():
    # 24 landmarks for 256 tokens of width 64: E and F on the input, then keys and values of only the landmarks.
    encoder = {"kind": "masked_lm", "max_positions": 256}
    compression = {"rank": 24}
    linformer = core({"preset": "linformer", "compression": compression}, **encoder)
    assert linformer == {"landmarks": 2 * 24 * 2 * 64, "far": 4 * 24 * 4 * 16}
    assert core({"preset": "flurka_rnn", "compression": compression}, **encoder) == {
        "landmarks": 2 * 24 * 2 * 64,
        "feature_map": 0,
        "state": 4 * 24 / 256 * 2 * 16 * 17,
        "readout": 4 * 2 * 16 * 17,
    }
    config = {"preset": "flurka_rnn", "compression": compression}
    built = forward_flops(model(attention=config, **encoder), 256, 8)["projections"]
    assert built == 2 * 2 * 64 * 16 * (8 + 8 * 24 / 256)


@pytest.mark.parametrize(
    ("seq_len", "size", "skipped"), itertools.product([1, 7, 8, 9, 37], [1, 8, 64], [1, 2])
)
def test_mean_complete_blocks_equals_a_count_of_blocks_before_the_window(seq_len, size, skipped):
    blocks = sum(max(0, query // size - skipped + 1) for query in range(seq_len))
    assert mean_complete_blocks(seq_len, size, skipped) == blocks / seq_len


def test_flops_of_eva():
    # Windows of 64 tokens and chunks of 16: causal queries see the chunks before their own, 7.5 of 16 on average.
    assert core("eva") == {
        "summaries": 4 * (2 * 2 * 16 * 16 / 16 + 4 * 16),
        "near": 4 * 65 / 2 * 4 * 16,
        "far": 4 * 7.5 * 4 * 16,
    }


def test_a_token_of_an_encoder_attends_to_all_tokens():
    assert forward_flops(model(), 9, 50)["near"] == 2 * 4 * 5 * 4 * 16
    assert forward_flops(model(kind="masked_lm"), 9, 50)["near"] == 2 * 4 * 9 * 4 * 16


def test_masked_models_need_logits_of_hidden_tokens_and_classifiers_none():
    masked, head = model(kind="masked_lm"), 2 * 64 * 50
    saved = flops_per_token(masked, 9, 50) - flops_per_token(masked, 9, 50, predicted=0.15)
    assert saved == pytest.approx(0.85 * head)
    classifier = model(kind="classifier", classifier={"num_classes": 3})
    assert forward_flops(classifier, 9, 50)["head"] == 0

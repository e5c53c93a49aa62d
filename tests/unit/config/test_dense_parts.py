"""Model keys for families of dense checkpoints, and their constraints."""

import pytest

from .trees import config, problems

LONGROPE = {
    "kind": "longrope",
    "original_seq_len": 64,
    "seq_len": 512,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
}
DYNAMIC = {"kind": "dynamic", "factor": 2, "original_seq_len": 64}


@pytest.mark.parametrize(
    ("model", "key", "remedy"),
    [
        ({"qk_norm_width": "all"}, "model.qk_norm_width", "remove it or set qk_norm: true"),
        ({"norm": "layernorm", "zero_centered_norm": True}, "model.zero_centered_norm",
         "remove it or take norm: rmsnorm"),
        ({"normalized_residual": True, "norm_placement": "after"}, "model.normalized_residual",
         "remove it or take norm_placement: both"),
        ({"rope_pattern": ["main", "local"]}, "model.local_rope", "add its base"),
        ({"local_rope": {"base": 100.0}}, "model.local_rope", "remove it or name layers local in rope_pattern"),
        ({"rope_pattern": ["local"], "local_rope": {"scaling": DYNAMIC}}, "model.local_rope.scaling.kind",
         "take linear, ntk, yarn or llama3, or name the layers main in rope_pattern"),
        ({"position": "none", "rope_pattern": ["none"]}, "model.rope_pattern", "remove it or take position: rope"),
        ({"rope_pattern": ["none"], "attention": {"preset": "flurka", "far_rope": "centroid"}},
         "model.rope_pattern", "set far_rope: none in layers that are not rotated"),
        ({"rope_scaling": {"kind": "longrope", "original_seq_len": 64}}, "model.rope_scaling.short_factor",
         "add short_factor"),
        ({"rope_scaling": LONGROPE | {"long_factor": [2.0] * 3}}, "model.rope_scaling.long_factor", "give 16"),
        ({"rope_scaling": DYNAMIC}, "model.rope_scaling.kind", "set model.rope_scaling.seq_len=512"),
        ({"attention": {"preset": "flurka", "softcap": 50.0}}, "model.attention.softcap", "remove it"),
        ({"residual_multiplier": 0}, "model.residual_multiplier", None),
    ],
)  # fmt: skip
def test_invalid_combinations_of_model_keys_are_refused(model, key, remedy):
    found = problems(model=model)
    assert key in found, found
    assert remedy in (None, found[key].remedy)


def test_ring_attention_with_softcap_is_refused():
    sections = {"attention": {"preset": "softmax", "softcap": 50.0}}
    found = problems(model=sections, parallel={"context": 2, "softmax_exchange": "ring"})
    assert found["parallel.softmax_exchange"].remedy == "set auto or heads"
    assert "parallel.softmax_exchange" not in problems(model=sections, parallel={"context": 2})


def test_soft_capped_windows_need_no_heads_that_divide_if_a_shard_is_as_long():
    parallel = {"context": 8}  # shards of 64 tokens

    def found(window):
        return problems(
            model={"attention": {"preset": "softmax", "softcap": 50.0, "window": window}}, parallel=parallel
        )

    assert not found(65)
    assert "does not divide the 4 heads" in found(66)["parallel.context"].reason


def test_layers_rotate_according_to_the_pattern():
    sections = {"rope_pattern": ["local", "main", "none"], "local_rope": {"base": 100.0}, "num_layers": 4}
    model = config(model=sections).model
    assert [rope and rope[0] for rope in map(model.layer_rope, range(4))] == [100.0, 10_000.0, None, 100.0]


def test_longrope_targets_the_training_sequence_length():
    assert config(model={"rope_scaling": LONGROPE}).model.rope_scaling.target_seq_len == 512

import pytest
import torch

from megakernel.attention import ALL_HEADS, AttentionInputs, HeadShard, Rotary, build
from megakernel.attention.compression import pooling_logits
from megakernel.attention.heads import generator
from megakernel.attention.map_parameters import orthogonal_gaussian
from megakernel.config.attention import PRESETS, Attention, expand_preset
from tests.unit.attention.shards import Table, ThreadShard

QKV = [torch.randn(1, 4, 150, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_name_a_tree_and_a_validated_tree_build_the_same_layer(preset):
    validated = Attention.model_validate(expand_preset(preset))
    causal = validated.mixes_future_tokens is None
    layers = [
        build(config, num_heads=4, head_dim=8, causal=causal, max_positions=64)
        for config in (preset, {"preset": preset}, validated)
    ]
    states = [layer.state_dict() for layer in layers]
    for layer, state in zip(layers, states):
        assert type(layer) is type(layers[0])
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[name], states[0][name]) for name in state)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("flurcka", {}, "flurcka"),
        ({"preset": "flurka", "rank": 8}, {}, "rank"),
        ("flurka", {"causal": False}, "causal"),
        ("local", {"causal": False}, "causal"),
        ("softmax", {"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ("softmax", {"num_kv_heads": 0}, "num_kv_heads=0; expected at least 1"),
        ("flurka", {"num_heads": 0}, "num_heads=0; expected at least 1"),
        ("performer", {"head_dim": -1}, "head_dim=-1; expected at least 1"),
        ("linear", {"heads": HeadShard(0, 3)}, "num_heads=4 does not divide over 3 shards"),
        (
            "linear",
            {"num_kv_heads": 2, "heads": HeadShard(0, 4)},
            "num_kv_heads=2 does not divide over 4 shards",
        ),
    ],
)
def test_invalid_attention_is_refused_with_the_reason(config, options, message):
    with pytest.raises(ValueError, match=message):
        build(config, **({"num_heads": 4, "head_dim": 8} | options))


def test_extending_needs_a_causal_layer():
    with pytest.raises(ValueError, match="build it with causal=True"):
        build("linear", num_heads=4, head_dim=8, causal=False).extend(*QKV)


def test_a_padding_mask_must_fit_and_excludes_context_parallelism():
    module = build("linear", num_heads=4, head_dim=8)
    with pytest.raises(ValueError, match=r"padding_mask has shape \(1, 149\); expected \(1, 150\)"):
        module(*QKV, AttentionInputs(padding_mask=torch.ones(1, 149, dtype=torch.bool)))
    with pytest.raises(ValueError, match="keep the sequence whole"):
        module(
            *QKV,
            AttentionInputs(
                cp_shard=ThreadShard(Table(2), 0), padding_mask=torch.ones(1, 150, dtype=torch.bool)
            ),
        )


def test_a_halo_longer_than_the_shard_is_refused():
    with pytest.raises(ValueError, match="a shard of 150 tokens is shorter than the 200 tokens"):
        build({"preset": "local", "near": {"block_size": 200}}, num_heads=4, head_dim=8)(
            *QKV, AttentionInputs(cp_shard=ThreadShard(Table(2), 0))
        )


def test_parameters_shared_by_heads_pass_through_the_head_shard():
    shared_parameters = []
    heads = HeadShard(0, 2, shared=lambda x: shared_parameters.append(x) or x)
    module = build("flurka", num_heads=4, head_dim=8, heads=heads, rotary=False)
    module(*(x[:, :2] for x in QKV))
    assert [x is y for x, y in zip(shared_parameters, (module.pool_keys, module.pool_values))] == [True, True]
    assert ALL_HEADS.shared(module.pool_keys) is module.pool_keys


def test_random_matrices_have_orthogonal_rows_of_gaussian_length():
    omega = orthogonal_gaussian(4000, 8, generator(0, 0)).view(500, 8, 8)
    gram = omega @ omega.transpose(-1, -2)
    off_diagonal = gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))
    assert off_diagonal.abs().max() < 1e-12
    # E |omega|^2 = d; the mean of 4,000 chi-square numbers with 8 degrees of freedom is off by at most 0.25 (4 sigma).
    assert abs(gram.diagonal(dim1=-2, dim2=-1).mean().item() - 1.0 * 8) < 0.26


def test_landmarks_start_as_means_over_their_own_tokens():
    weights = pooling_logits(3, 8).double().softmax(-1)
    own = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1, 1]])
    torch.testing.assert_close(
        (weights * own).sum(1), torch.full((3,), 0.9, dtype=torch.float64), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(pooling_logits(1, 8).softmax(-1), torch.full((1, 8), 1 / 8))


def test_with_one_landmark_per_token_attention_starts_exact():
    torch.testing.assert_close(
        pooling_logits(16, 16).double().softmax(-1), torch.eye(16).double(), rtol=0, atol=1e-15
    )
    tree = {"preset": "flurka_kernel", "compression": {"block_size": 16, "rank": 16}}
    qkv = [x.double() for x in QKV]
    exact = build("hedgehog", num_heads=4, head_dim=8).double()(*qkv)
    torch.testing.assert_close(
        build(tree, num_heads=4, head_dim=8, rotary=False).double()(*qkv), exact, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(("gate_bias", "expected"), [(0.0, 0.5), (3.0, 0.9525741268)])
def test_the_gate_starts_at_its_bias(gate_bias, expected):
    q, k, _ = QKV
    tree = {"preset": "flurka", "near": {"gate_bias": gate_bias}}
    module = build(tree, num_heads=4, head_dim=8, rotary=False)
    # In the second block the far context is the first block: values 0 near and 1 far show the weight of the window.
    v = torch.zeros(1, 4, 150, 8)
    v[:, :, :64] = 1
    torch.testing.assert_close(1 - module(q, k, v)[:, :, 64:128], torch.full((1, 4, 64, 8), expected))


@pytest.mark.parametrize(
    "feature_map",
    [
        *(
            {"name": name}
            for name in ("elu", "hedgehog", "favor", "gmm_prf", "fastfood_prf", "generative_prf")
        ),
        {"name": "gmm_rks", "smoothing": 1.0},
    ],
    ids=lambda feature_map: feature_map["name"],
)
def test_with_a_shared_normalizer_far_and_near_start_on_the_same_scale(feature_map):
    tree = {
        "preset": "flurka",
        "near": {"join": "shared"},
        "compression": {"block_size": 16},
        "feature_map": feature_map,
    }
    zeros, v = torch.zeros(1, 4, 150, 8).double(), QKV[2].double()
    # All weights are equal, so each token sees the mean of the values so far.
    mean = v.cumsum(2) / torch.arange(1, 151)[:, None]
    layer = build(tree, num_heads=4, head_dim=8, rotary=False).double()
    torch.testing.assert_close(layer(zeros, zeros, v), mean)


def test_rotary_depends_only_on_distance():
    rotary = Rotary(8)
    q, k = (torch.randn(1, 1, 1, 8, dtype=torch.float64) for _ in range(2))

    def dot(i, j):
        positions = torch.tensor([[i]]), torch.tensor([[j]])
        return (rotary(q, positions[0]) * rotary(k, positions[1])).sum()

    torch.testing.assert_close(dot(7, 4), dot(1_000_007, 1_000_004))
    torch.testing.assert_close(dot(0, 0), (q * k).sum())
    assert not torch.isclose(dot(7, 4), dot(7, 5))


def test_rotary_is_exact_in_float32_at_a_million_tokens():
    x, far = torch.randn(1, 1, 1, 8), torch.tensor([[1_048_575]])
    torch.testing.assert_close(Rotary(8)(x, far).double(), Rotary(8)(x.double(), far), rtol=0, atol=1e-6)


def test_rotary_needs_an_even_head_dimension():
    with pytest.raises(ValueError, match="head_dim=7"):
        Rotary(7)


@pytest.mark.parametrize("preset", ["softmax", "linear", "local", "flurka", "mgk", "mamba2", "eva"])
@pytest.mark.parametrize("method", ["forward", "extend"])
def test_heads_and_width_that_do_not_fit_are_refused_and_a_transposition_is_named(preset, method):
    layer = build(preset, num_heads=4, num_kv_heads=2, head_dim=8, rotary=False)
    call = getattr(layer, method)
    further = {} if not layer.spec.further else {"further": torch.zeros(1, 2, 150, layer.spec.further)}
    options = {"inputs": AttentionInputs(**further)} if method == "forward" else further
    keys = (2,) * (layer.keys_per_head > 1)

    def run(*, heads=4, kv_heads=2, value_heads=2, width=8, transposed=False):
        q = torch.zeros(1, heads, 150, width)
        k, v = torch.zeros(1, kv_heads, *keys, 150, width), torch.zeros(1, value_heads, 150, width)
        if transposed:
            q, v = q.transpose(1, 2), v.transpose(1, 2)
            k = k.transpose(1, 2) if not keys else k
        return call(q, k, v, **options)

    run()
    with pytest.raises(ValueError, match=r"q has shape \(1, 7, 150, 8\); expected \(batch, 4, tokens, 8\)"):
        run(heads=7)
    with pytest.raises(ValueError, match=r"q has shape \(1, 4, 150, 16\); expected \(batch, 4, tokens, 8\)"):
        run(width=16)
    with pytest.raises(ValueError, match=r"k has shape \(1, 4, .*150, 8\); expected \(1, 2, .*150, 8\)"):
        run(kv_heads=4)
    with pytest.raises(ValueError, match=r"v has shape \(1, 4, 150, 8\); expected \(1, 2, 150, width\)"):
        run(value_heads=4)
    with pytest.raises(
        ValueError, match=r"looks like \(batch, tokens, heads, width\): pass x.transpose\(1, 2\)"
    ):
        run(transposed=True)


@pytest.mark.parametrize(
    ("config", "numbers"),
    [("mamba2", 1), ("gated_deltanet", 2), ("flurka_decay", 1), ({"mechanism": "simple_gla"}, 1)],
    ids=["mamba2", "gated_deltanet", "flurka_decay", "simple_gla"],
)
def test_a_decay_of_the_token_needs_a_projection_of_the_input(config, numbers):
    layer = build(config, num_heads=4, head_dim=8, rotary=False)
    for call in (layer, layer.extend):
        with pytest.raises(ValueError, match=rf"further is missing.*\(1, 4, 150, {numbers}\)"):
            call(*QKV)
    with pytest.raises(ValueError, match=r"further has shape \(1, 4, 150, 3\)"):
        layer.extend(*QKV, further=torch.zeros(1, 4, 150, 3))
    layer.extend(*QKV, further=torch.zeros(1, 4, 150, numbers))
    with pytest.raises(ValueError, match="further has no effect"):
        build("retnet", num_heads=4, head_dim=8).extend(*QKV, further=torch.zeros(1, 4, 150, 1))


ROTATED = {
    "flurka": "flurka",
    "flurka_kernel": {"preset": "flurka_kernel", "far_rope": "centroid"},
    "linformer_causal": "linformer_causal",
    "landmarks of an encoder": {"similarity": "softmax", "compression": {}, "far_rope": "centroid"},
}


@pytest.mark.parametrize("name", ROTATED)
def test_a_layer_that_rotates_after_compression_needs_a_rotary_or_the_word_that_there_is_none(name):
    causal = name.startswith(("flurka", "linformer"))
    tree = ROTATED[name]
    if not causal:
        tree = tree | {"compression": {"compress": "projected"}}
    layer = build(tree, num_heads=4, head_dim=8, causal=causal)
    with pytest.raises(
        ValueError, match=r"rotary is missing.*AttentionInputs\(rotary=Rotary\(8\)\).*rotary=False"
    ):
        layer(*QKV)
    q, k, v = QKV
    qkv = 3 * q, 3 * k, v
    rotated = layer(*qkv, AttentionInputs(rotary=Rotary(8)))
    plain = build(tree, num_heads=4, head_dim=8, causal=causal, rotary=False)(*qkv)
    # Rotation changes outputs by as much as the outputs are, within blocks and, for centroid, across them.
    assert (rotated - plain).norm() > 0.1 * plain.norm()
    if causal:
        with pytest.raises(ValueError, match="rotary is missing"):
            layer.extend(*qkv)
        torch.testing.assert_close(layer.extend(*qkv, rotary=Rotary(8))[0], rotated)


@pytest.mark.parametrize("preset", ["linformer", "flurka_rnn", "flurka_eva"])
def test_keys_of_all_tokens_are_refused_where_landmarks_are_expected(preset):
    tree = {"preset": preset, "compression": {"rank": 6}}
    layer = build(tree, num_heads=4, head_dim=8, causal=False, max_positions=150)
    with pytest.raises(
        ValueError, match=r"expected \(1, 4, 6, 8\); k and v are landmarks.*compress: projected"
    ):
        layer(*QKV)
    q, k, v = QKV
    layer(q, k[:, :, :6], v[:, :, :6])
    tree["compression"]["compress"] = "projected"
    build(tree, num_heads=4, head_dim=8, causal=False, max_positions=150)(*QKV)

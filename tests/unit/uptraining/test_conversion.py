"""FLuRKA from the weights of related mechanisms, and with fewer landmarks."""

import pytest
import torch

from megakernel import attention
from megakernel.attention.compression import pooling_logits
from megakernel.checkpoint.conversion import convert_attention, fewer_landmarks, rank_steps
from megakernel.checkpoint.fragments import WHOLE
from megakernel.checkpoint.sharded_load import compare, load_weights, whole_shapes
from megakernel.checkpoint.whole_tensors import partitions
from megakernel.config import Model, UserError
from megakernel.model import LanguageModel, ModelSettings

BLOCK, TOKENS = 4, 14
SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "vocab_multiple": 32}


def block(rank, **more):
    return {"compression": {"block_size": BLOCK, "rank": rank} | more}


class StateDict:
    """The weights of a model behind the interface of a checkpoint."""

    def __init__(self, model):
        self.tensors = {name: x for name, x in model.state_dict().items() if isinstance(x, torch.Tensor)}
        self.names = set(self.tensors)

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def read(self, name, keys, fragment=WHOLE):
        return {"fp32": fragment.of(self.tensors[name]).clone()}


def build(mesh, config, seed=None, **parts):
    """A model with its initial values or, given a seed, random ones."""
    section = Model(**{"position": "none", **SIZES, "attention": config} | parts)
    model = LanguageModel(ModelSettings(section, vocab_size=32, mesh=mesh)).double().eval()
    if seed is not None:
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return model


def converted(mesh, model, config, **parts):
    """The model converted to another attention, and the parameters that the old one lacks."""
    new = build(mesh, config, **parts)
    source = convert_attention(StateDict(model), model.settings.model, new.settings.model)
    found = compare(whole_shapes(new, partitions(new), mesh.tp), source)
    assert not found.misshapen
    assert not found.unexpected
    load_weights(new, partitions(new), mesh.tp, source, found.common)
    return new, {name.split(".core.")[1] for name in found.missing}


def losses(model):
    """Losses on packed documents."""
    tokens = torch.randint(32, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    positions = torch.stack([torch.arange(TOKENS), torch.cat([torch.arange(5), torch.arange(9)])])
    with torch.no_grad():
        return model.losses(tokens, positions, tokens.roll(-1, 1), torch.ones(1))


@pytest.mark.parametrize("feature_map", ["hedgehog", "favor", "elu"])
@pytest.mark.parametrize("near_blocks", [1, 2])
def test_flurka_with_one_landmark_per_token_equals_its_kernel_model(mesh, feature_map, near_blocks):
    kernel = {"similarity": "kernel", "feature_map": {"name": feature_map}}
    flurka = {**kernel, **block(BLOCK), "near": {"kind": "kernel", "blocks": near_blocks}}
    base = build(mesh, kernel, seed=1)
    new, missing = converted(mesh, base, flurka)
    assert missing == {"far_mass"}
    # A landmark has weight e^-40 on tokens that are not its own.
    torch.testing.assert_close(losses(new), losses(base), rtol=1e-12, atol=1e-12)
    fewer, _ = converted(mesh, new, flurka | block(2))
    assert not torch.allclose(losses(fewer), losses(base), rtol=1e-6)


def test_fewer_landmarks_keep_all_other_learned_values(mesh):
    """Gates, feature maps and everything outside of the mechanisms stay unchanged."""
    old = build(mesh, {"preset": "flurka", **block(4)}, seed=1)
    new, missing = converted(mesh, old, {"preset": "flurka", **block(2)})
    assert missing == set()
    states = [StateDict(model).tensors for model in (old, new)]
    resized = {name for name, x in states[0].items() if x.shape != states[1][name].shape}
    assert {name.split(".core.")[1] for name in resized} == {"pool_keys", "pool_values"}
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items() if name not in resized)


@pytest.mark.parametrize("sharing", [{}, {"per_head": True}, {"share_kv": True}], ids=str)
def test_flurka_keeps_the_weights_of_low_rank_attention(mesh, sharing):
    """Softmax over landmarks becomes kernel attention over them; only its feature map is new."""
    base = build(mesh, {"preset": "linformer_causal", **block(2, **sharing)}, seed=1)
    flurka = {"preset": "flurka", **block(2, **sharing), "near": {"join": "shared"}}
    new, missing = converted(mesh, base, flurka)
    assert missing == {"projection.matrix"}
    for layer in (1, 2):
        core, old = (model.get_submodule(f"{layer}.self_attention.core") for model in (new, base))
        pools = old.compressor.matrices
        assert torch.equal(core.pool_keys, pools.select(-3, 0))
        if "share_kv" not in sharing:
            assert torch.equal(core.pool_values, pools.select(-3, 1))
        assert torch.equal(core.far_weight, old.far_weight)


def test_shared_landmarks_can_be_split_per_head(mesh):
    base = build(mesh, {"preset": "flurka", **block(4, share_kv=True)}, seed=1)
    new, missing = converted(mesh, base, {"preset": "flurka", **block(4, per_head=True)})
    assert missing == set()
    torch.testing.assert_close(losses(new), losses(base), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            block(4),
            block(3),
            r"layer 0: compression.rank=3 does not divide 4, .* take one of 1, 2, 4",
        ),
        (
            block(4),
            {"compression": {"block_size": 8, "rank": 4}},
            r"compression.block_size=8 was 4 .* leave it at 4",
        ),
        (block(4, per_head=True), block(4), "compression.per_head=False was True"),
        (block(4), block(4, share_kv=True), "compression.share_kv=True was False"),
    ],
)
def test_landmarks_that_cannot_be_derived_from_the_old_ones_are_refused(mesh, old, new, reason):
    base = build(mesh, {"preset": "flurka", **old})
    after = Model(**SIZES, attention={"preset": "flurka", **new})
    with pytest.raises(UserError, match=reason):  # before a tensor is read
        convert_attention(StateDict(base), base.settings.model, after)


@pytest.mark.parametrize("size", [8, 12])
def test_landmarks_merged_from_tokens_equal_the_initial_ones(size):
    """For every sequence of ranks."""
    for rank in (n for n in range(1, size + 1) if size % n == 0):
        logits = pooling_logits(size, size)
        for step in rank_steps(size, rank):
            logits = fewer_landmarks(logits, step)
        torch.testing.assert_close(logits.softmax(-1), pooling_logits(rank, size).softmax(-1))


def test_merging_landmarks_does_not_change_the_weights_of_equal_keys():
    """Even for pooling weights outside of a landmark's own tokens, merging only averages E."""
    draw = torch.Generator().manual_seed(0)
    k = torch.randn(1, 2, 1, 4, generator=draw, dtype=torch.float64).expand(-1, -1, TOKENS, -1)
    q, v = torch.randn(2, 1, 2, TOKENS, 4, generator=draw, dtype=torch.float64)
    outputs = []
    logits = torch.randn(2, 4, BLOCK, generator=draw, dtype=torch.float64)
    for rank in (4, 2, 1):
        core = attention.build(
            {"preset": "flurka_kernel", **block(rank)}, num_heads=2, head_dim=4, rotary=False
        ).double()
        with torch.no_grad():
            core.pool_keys.copy_(fewer_landmarks(logits[0], rank))
            core.pool_values.copy_(fewer_landmarks(logits[1], rank))
            outputs.append(core(q, k, v))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(outputs[2], outputs[0], rtol=1e-13, atol=1e-13)


def test_the_rank_is_reduced_by_the_smallest_possible_factors():
    assert rank_steps(64, 8) == [64, 32, 16, 8]
    assert rank_steps(60, 4) == [60, 20, 4]
    assert rank_steps(12, 12) == [12]
    with pytest.raises(UserError, match=r"compression.rank=8 does not divide 12, .* 1, 2, 3, 4, 6, 12"):
        rank_steps(12, 8)

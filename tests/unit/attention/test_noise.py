"""Random numbers of feature maps depend on the seed and the step, and on nothing else."""

import pytest
import torch
from torch import Tensor

from megakernel.attention import ALL_HEADS, AttentionLayer, HeadShard, build, redraw

LEARNED = ["gmm_rks", "gmm_prf", "generative_rks", "generative_prf"]


def layer(name: str, heads: HeadShard = ALL_HEADS, seed=(5, 1), **options) -> AttentionLayer:
    tree = {"similarity": "kernel", "feature_map": {"name": name, **options}}
    return build(tree, num_heads=4, head_dim=6, seed=seed, heads=heads)


def output(module: AttentionLayer) -> Tensor:
    q, k, v = torch.randn(3, 1, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    return module(q, k, v)


def frequencies(module: AttentionLayer) -> Tensor:
    return module.projection().detach().clone()


@pytest.mark.parametrize("name", LEARNED)
def test_noise_changes_every_100_steps_and_depends_only_on_the_step(name):
    module, other = layer(name), layer(name)
    first = frequencies(module)
    redraw(module, 99)
    assert torch.equal(frequencies(module), first)
    redraw(module, 100)
    assert not torch.equal(frequencies(module), first)
    redraw(other, 299)
    redraw(module, 200)
    assert torch.equal(frequencies(module), frequencies(other))


@pytest.mark.parametrize("name", LEARNED)
def test_a_loaded_layer_continues_like_the_saved_one(name):
    saved, loaded = layer(name), layer(name)
    for step in range(150, 155):
        redraw(saved, step)
        output(saved)
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(frequencies(loaded.eval()), frequencies(saved.eval()))
    for step in (155, 200):
        for module in (saved.train(), loaded.train()):
            redraw(module, step)
            output(module)
        assert torch.equal(frequencies(loaded.eval()), frequencies(saved.eval()))


@pytest.mark.parametrize("name", ["favor", "rff"])
def test_fixed_feature_maps_are_redrawn_only_if_configured(name):
    fixed, redrawn = layer(name), layer(name, resample_every=10)
    before = frequencies(fixed)
    for module in (fixed, redrawn):
        redraw(module, 1000)
    assert torch.equal(frequencies(fixed), before)
    assert not torch.equal(frequencies(redrawn), before)


@pytest.mark.parametrize("name", ["favor", *LEARNED, "fastfood_rks"])
def test_tensor_parallel_shards_have_the_numbers_of_the_unsharded_layer(name):
    """Also after a redraw: the random stream of a head does not depend on the rank."""
    parts = [layer(name, HeadShard(rank, 2)) for rank in range(2)]
    whole = layer(name)
    for module in (whole, *parts):
        redraw(module, 300)
    for key, value in whole.state_dict().items():
        shards = [part.state_dict()[key] for part in parts]
        shared = key not in parts[0].sharded_parameters()
        assert torch.equal(shards[0] if shared else torch.cat(shards), value), key


def test_running_statistics_are_updated_once_per_step():
    """However often micro-batches and recomputation run the layer."""
    once, often = layer("generative_rks"), layer("generative_rks")
    for step in range(3):
        for module, runs in ((once, 1), (often, 4)):
            redraw(module, step)
            for _ in range(runs):
                output(module)
    state = once.state_dict()
    assert state["projection.generator.hidden.0.variance"].ne(1).all()
    for key, value in often.state_dict().items():
        assert torch.equal(value, state[key]), key


def test_running_statistics_equal_those_of_batch_norm_in_torch():
    module = layer("generative_prf")
    hidden = module.projection.generator.hidden[0]
    batch_norm = torch.nn.BatchNorm1d(6)
    linear = torch.nn.functional.linear
    for step in range(0, 300, 100):
        redraw(module, step)
        output(module)
        batch_norm(linear(module.projection.noise(), hidden.weight, hidden.bias))
    torch.testing.assert_close(hidden.mean, batch_norm.running_mean)
    torch.testing.assert_close(hidden.variance, batch_norm.running_var)


@pytest.mark.parametrize("name", ["favor", *LEARNED])
def test_random_numbers_depend_only_on_the_seed(name):
    first, again, other = (frequencies(layer(name, seed=(5, layer_seed))) for layer_seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", ["favor", *LEARNED, "fastfood_prf"])
def test_half_precision_keeps_random_numbers_and_statistics_in_float32(name):
    module = layer(name).bfloat16()
    buffers = dict(module.named_buffers())
    assert buffers
    assert all(buffer.dtype in (torch.float32, torch.int64) for buffer in buffers.values())


def test_initial_values_are_those_of_the_paper_learning_the_kernel():
    tree = {"similarity": "kernel", "feature_map": {"name": "gmm_rks"}}
    module = build(tree, num_heads=8, head_dim=16).projection
    for values, bound in ((module.factor, (6 / (16 * 16 + 8 * 16)) ** 0.5), (module.mean, 1 / 16)):
        assert 0.9 * bound < values.abs().max() <= bound
    tree["feature_map"] = {"name": "gmm_prf"}
    module = build(tree, num_heads=8, head_dim=16).projection
    for values, bound in ((module.log_variance, (6 / (16 + 8)) ** 0.5), (module.mean, 16**-0.5)):
        assert 0.9 * bound < values.abs().max() <= bound


def test_initial_fastfood_rows_have_the_lengths_of_gaussian_vectors():
    tree = {"similarity": "kernel", "feature_map": {"name": "fastfood_rks", "samples": 64 * 16}}
    parts = build(tree, num_heads=1, head_dim=64).projection()
    assert set(parts.signs.unique().tolist()) == {-1.0, 1.0}
    lengths = parts.scales * parts.gaussians.norm(dim=-1, keepdim=True)
    # chi with 64 degrees of freedom: mean 7.97, standard deviation 0.705, over 1024 rows.
    assert lengths.mean().item() == pytest.approx(7.97, abs=5 * 0.705 / 32)
    assert lengths.std().item() == pytest.approx(0.705, rel=0.15)


def test_fastfood_samples_must_be_a_multiple_of_the_head_dimension():
    with pytest.raises(ValueError, match="samples=10 is not a multiple of head_dim=6; set 6 or 12"):
        layer("fastfood_rks", samples=10)


def test_random_numbers_do_not_depend_on_the_default_device():
    eva = build("eva", num_heads=2, head_dim=4).summaries
    indices = torch.tensor([[0, 3]])
    expected = eva.noise(indices, 4)
    with torch.device("meta"):
        assert torch.equal(eva.noise(indices, 4), expected)
        assert build("mamba2", num_heads=2, head_dim=4).decay_bias.is_meta

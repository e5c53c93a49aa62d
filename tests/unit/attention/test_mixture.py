import pytest
import torch

from megakernel.attention import AttentionInputs, Rotary, build, finish_step
from megakernel.ops.weighted_attention import responsibilities
from megakernel.papers.mixture_keys.pairwise import PairwiseAttention

HEADS, KV, N, WIDTH = 4, 2, 12, 6


def layer(causal: bool = True, **mixture) -> PairwiseAttention:
    tree = {"preset": "mgk", "mixture": mixture}
    built = build(tree, num_heads=HEADS, num_kv_heads=KV, head_dim=WIDTH, causal=causal, seed=(3, 1))
    assert isinstance(built, PairwiseAttention)
    return built.double()


def inputs(keys: int = 2, batch: int = 2):
    draw = torch.Generator().manual_seed(0)
    shapes = ((batch, HEADS, N, WIDTH), (batch, KV, keys, N, WIDTH), (batch, KV, N, WIDTH))
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def no_reduction(tensor):
    return tensor


def test_an_m_step_sets_priors_to_the_mean_responsibility_of_the_batch():
    module = layer(m_step=True)
    q, k, v = inputs()
    before = module.mixture.priors().clone()
    outputs = [module(q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in range(2)]
    # All outputs of the step used the old priors.
    torch.testing.assert_close(torch.cat(outputs), layer(m_step=True)(q, k, v))
    finish_step(module, no_reduction)
    weights = responsibilities(q, k, key_weights=before[..., None])
    # Each query of each of the two heads of a key head sees the pairs up to itself.
    pairs = 2 * 2 * N * (N + 1) / 2
    expected = (weights.sum((0, 3)) / pairs).to(before.dtype)
    torch.testing.assert_close(module.mixture.priors(), expected)
    assert not torch.equal(module.mixture.priors(), before)


def test_an_m_step_ignores_padding():
    q, k, v = inputs()
    mask = torch.rand(2, N, generator=torch.Generator().manual_seed(1)) > 0.4
    for causal in (True, False):
        padded, compact = layer(causal, m_step=True), layer(causal, m_step=True)
        padded(q, k, v, AttentionInputs(padding_mask=mask))
        for row, real in enumerate(mask):
            compact(q[row : row + 1, :, real], k[row : row + 1, ..., real, :], v[row : row + 1, :, real])
        torch.testing.assert_close(padded.mixture.counted, compact.mixture.counted)


def test_evaluation_does_not_count_for_the_m_step():
    module = layer(m_step=True).eval()
    module(*inputs())
    assert not module.mixture.counted.any()


@pytest.mark.parametrize("factor", [None, torch.nan], ids=["no step", "not finite"])
def test_an_m_step_without_finite_responsibilities_keeps_the_priors(factor):
    module = layer(m_step=True)
    q, k, v = inputs()
    module(q, k, v)
    finish_step(module, no_reduction)
    before = module.mixture.priors().clone()
    if factor is not None:
        module(q, k * factor, v)
    finish_step(module, no_reduction)
    assert torch.equal(module.mixture.priors(), before)


def test_recomputation_does_not_change_the_m_step():
    once, twice = layer(m_step=True), layer(m_step=True)
    q, k, v = inputs()
    once(q, k, v)
    twice(q, k, v)
    twice(q, k, v)
    for module in (once, twice):
        finish_step(module, no_reduction)
    torch.testing.assert_close(once.mixture.priors(), twice.mixture.priors())


def test_priors_stay_in_full_precision_and_in_the_state_dict():
    module = layer(m_step=True).bfloat16()
    assert module.state_dict()["mixture.weights"].dtype.itemsize >= 4
    assert "mixture.counted" not in module.state_dict()


def test_shifts_depend_only_on_the_seed_and_the_head():
    first, again, other = (
        build("smgk", num_heads=HEADS, head_dim=WIDTH, seed=(3, seed)).mixture.shift for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    assert abs(first.std() - 1) < 0.3, "48 standard normal numbers"


def test_presets_have_their_number_of_projected_keys():
    for preset, keys in (("mgk", 2), ("smgk", 1), ("mlk", 2), ("smlk", 1), ("gaussian", 1)):
        assert build(preset, num_heads=HEADS, head_dim=WIDTH).keys_per_head == keys


@pytest.mark.parametrize("preset", ["mgk", "mlk"])
def test_padding_does_not_change_mixtures_of_keys(preset):
    q, k, v = inputs()
    mask = torch.rand(2, N, generator=torch.Generator().manual_seed(1)) > 0.4
    module = build(preset, num_heads=HEADS, num_kv_heads=KV, head_dim=WIDTH)
    rotary = Rotary(WIDTH)
    out = module(q, k, v, AttentionInputs(rotary=rotary, padding_mask=mask))
    for row, real in enumerate(mask):
        part = (q[row : row + 1, :, real], k[row : row + 1, ..., real, :], v[row : row + 1, :, real])
        torch.testing.assert_close(out[row : row + 1, :, real], module(*part, AttentionInputs(rotary=rotary)))

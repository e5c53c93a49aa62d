"""What low rank and EVA promise where tokens see both ways."""

import pytest
import torch

from megakernel.attention import HeadShard, Rotary, build
from megakernel.model.compressed_input import real_first
from tests.unit.attention.mechanisms import (
    BIDIRECTIONAL,
    WIDTH,
    assert_close,
    gradients,
    layer,
    shard_of,
    tokens,
)
from tests.unit.attention.pieces import in_pieces

LOW_RANK = (
    "linformer",
    "linformer_per_head",
    "linformer_mixture",
    "low_rank_blocks_mixture",
    "flurka_performer_mixture",
    "flurka_rnn",
    "flurka_performer",
    "low_rank_blocks",
    "flurka_pool",
)
EVA = ("eva", "eva_overlap", "flurka_eva")
every_mechanism = pytest.mark.parametrize("name", [*LOW_RANK, *EVA])
ROTARY = Rotary(WIDTH)


@every_mechanism
@pytest.mark.parametrize("length", [1, 3, 24])
def test_equals_the_quadratic_reference(name, length, monkeypatch):
    module = layer(name, causal=False)
    q, k, v = tokens(2, length)
    out = module(q, k, v, rotary=ROTARY)
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "reference")
    expected = module(q, k, v, rotary=ROTARY)
    assert_close(out, expected)
    for actual, wanted in zip(gradients(module, out, q, k, v), gradients(module, expected, q, k, v)):
        assert_close(actual, wanted)


@every_mechanism
def test_gradients_are_the_slopes(name):
    module = layer(name, causal=False)
    q, k, v = tokens(1, 7)
    inputs = (q, k, v, *module.parameters())
    assert torch.autograd.gradcheck(lambda q, k, v, *_: module(q, k, v, rotary=ROTARY), inputs)


@every_mechanism
def test_padding_anywhere_changes_nothing(name):
    module = layer(name, causal=False)
    q, k, v = (x.detach() for x in tokens(3, 24))
    mask = torch.rand(3, 24, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[2] = False
    out = module(q, k, v, mask, rotary=ROTARY)
    for row, real in enumerate(mask[:2]):
        alone = module(*(x[row : row + 1, :, real] for x in (q, k, v)), rotary=ROTARY)
        assert_close(out[row : row + 1, :, real], alone)
        assert not out[row, :, ~real].any()
    assert not out[2].any()


@pytest.mark.parametrize("name", ["low_rank_blocks", "flurka_pool", "eva", "eva_overlap"])
@pytest.mark.parametrize("length", [3, 24])
def test_constant_values_give_constant_output(name, length):
    q, k, v = tokens(2, length)
    constant = torch.full_like(v, 1.5)
    assert_close(layer(name, causal=False)(q, k, constant, rotary=ROTARY), torch.full_like(q, 1.5))


@every_mechanism
@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_heads_give_the_unsharded_numbers(name, size):
    kv_heads = max(2, size)
    whole = layer(name, kv_heads=kv_heads, causal=False)
    q, k, v = tokens(2, 24, kv_heads=kv_heads)
    outputs = [
        shard_of(whole, name, HeadShard(rank, size), kv_heads, causal=False)(
            *(x.chunk(size, 1)[rank] for x in (q, k, v)), rotary=ROTARY
        )
        for rank in range(size)
    ]
    assert_close(torch.cat(outputs, 1), whole(q, k, v, rotary=ROTARY))


@pytest.mark.parametrize("name", LOW_RANK)
@pytest.mark.parametrize("size", [2, 4])
def test_pieces_of_a_sequence_give_the_whole(name, size):
    module = layer(name, causal=False)
    q, k, v = tokens(2, 32)
    expected = module(q, k, v, rotary=ROTARY)

    def work(piece):
        return module(*(x.chunk(size, 2)[piece.rank] for x in (q, k, v)), rotary=ROTARY, piece=piece)

    out = torch.cat(in_pieces(size, work), 2)
    assert_close(out, expected)
    for actual, wanted in zip(gradients(module, out, q, k, v), gradients(module, expected, q, k, v)):
        assert_close(actual, wanted)


@pytest.mark.parametrize(
    "name",
    ["linformer", "linformer_mixture", "flurka_rnn", "flurka_performer", "low_rank_blocks", "flurka_eva"],
)
@pytest.mark.parametrize("padded", [False, True])
def test_compressing_before_or_after_bias_free_projections_is_the_same(name, padded):
    """FLuRKA's eqs. 1 and 2: W (E X) = E (X W); which comes first is a matter of speed."""
    tree = BIDIRECTIONAL[name]
    before = dict(tree, compression=dict(tree["compression"], compress="input"))
    sizes = {"num_heads": 2, "head_dim": WIDTH, "causal": False, "max_positions": 64, "seed": 3}
    first, second = (build(form, **sizes).double().eval() for form in (before, tree))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(22, 2, 12, generator=draw, dtype=torch.float64)
    w_q, w_k, w_v = (torch.randn(12, 2 * WIDTH, generator=draw, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(2, 22, generator=draw) > 0.4 if padded else None

    def heads(y):
        return y.unflatten(-1, (2, WIDTH)).permute(1, 2, 0, 3)

    landmarks = first.compress(x if mask is None else real_first(x, mask), first=0, length=22)
    found = first(heads(x @ w_q), heads(landmarks[0] @ w_k), heads(landmarks[-1] @ w_v), mask)
    assert_close(found, second(heads(x @ w_q), heads(x @ w_k), heads(x @ w_v), mask))


def test_rows_longer_than_the_matrices_are_refused():
    module = layer("linformer", causal=False)
    with pytest.raises(ValueError, match=r"rows of 65 tokens exceed max_positions=64"):
        module(*tokens(1, 65))


def test_landmarks_of_whole_rows_are_refused_where_tokens_see_the_past_only():
    with pytest.raises(ValueError, match="linformer without a near window mixes future tokens"):
        build("linformer", num_heads=2, head_dim=4, max_positions=8)


def test_entries_of_linformers_matrices_have_variance_one_over_rank():
    module = build("linformer", num_heads=2, head_dim=4, causal=False, max_positions=400)
    for matrix in module.parameters():
        assert matrix.shape == (256, 400)
        # The variance of 102,400 samples is off by 0.4% (one standard deviation).
        assert matrix.var().item() == pytest.approx(1 / 256, rel=0.02)


def test_training_noise_follows_the_step_alone_and_evaluation_has_none():
    module = layer("eva", causal=False)
    q, k, v = tokens(1, 12)
    module.summaries.redraw(5)
    first = module(q, k, v)
    module.summaries.redraw(6)
    assert not torch.equal(module(q, k, v), first)
    module.summaries.redraw(5)
    assert torch.equal(module(q, k, v), first)
    calm = module.eval()(q, k, v)
    module.summaries.redraw(7)
    assert torch.equal(module(q, k, v), calm)


def test_one_window_that_is_the_whole_row_beside_its_chunks():
    """Excluding the exact window leaves plain softmax attention."""
    form = {"preset": "eva", "eva": {"window_size": 16, "chunk_size": 4, "exclude_window": True}}
    q, k, v = (x[:, :2] for x in tokens(2, 11))
    sizes = {"num_heads": 2, "head_dim": WIDTH, "causal": False}
    eva, softmax = (build(tree, **sizes).double() for tree in (form, "softmax"))
    assert_close(eva(q, k, v), softmax(q, k, v))

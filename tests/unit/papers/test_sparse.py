"""BigBird, Informer and Reformer: their draws, and cases in which they are softmax attention.

`tests/unit/ops/test_contract.py` compares them with dense references, as `tests/unit/attention` does with padding.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.attention import AttentionInputs, build, redraw
from megakernel.config.algebra import Informer
from megakernel.papers.sparse.bigbird_attention import MISSING, choose_blocks
from megakernel.papers.sparse.informer_attention import chosen_numbers

PRESETS = ("bigbird", "informer", "reformer")
HEADS, WIDTH = 2, 8


def layer(preset: str, seed: int = 0, **settings):
    tree = {"preset": preset, preset: settings}
    return build(tree, num_heads=HEADS, head_dim=WIDTH, causal=False, seed=(seed, 0)).double()


def qkv(length: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, length, WIDTH, generator=draw, dtype=torch.float64) for _ in range(3)]


def weights_of(module, length: int) -> Tensor:
    """The weights (H, N, N) of queries on tokens, for the queries and keys of `qkv`."""
    q, k, _ = qkv(length)
    return module(q, k, torch.eye(length, dtype=q.dtype).expand(1, HEADS, -1, -1))[0]


# BigBird


def test_random_blocks_are_distinct_uniform_and_none_of_the_fixed_ones():
    blocks, count, rounds = 12, 3, 4000
    draws = torch.randint(2**31, (rounds, blocks, count), generator=torch.Generator().manual_seed(0))
    chosen = choose_blocks(draws, torch.tensor([blocks]), 1)[0]
    for block, of_block in enumerate(chosen.unbind(1)):
        assert all(len(set(row)) == count for row in of_block.tolist())
        free = set(range(blocks)) - {0, blocks - 1, block - 1, block, block + 1}
        shares = of_block.flatten().bincount(minlength=blocks) / rounds
        assert {at for at, share in enumerate(shares.tolist()) if share} == free
        expected = count / len(free)
        # Five standard deviations of a share.
        deviation = (expected * (1 - expected) / rounds) ** 0.5
        assert (shares[sorted(free)] - expected).abs().max() < 5 * deviation


def test_with_too_few_blocks_all_are_chosen_once():
    draws = torch.randint(2**31, (1, 6, 3), generator=torch.Generator().manual_seed(0))
    chosen = choose_blocks(draws, torch.tensor([6, 2]), 1)
    # Block 2 of 6 has 0, 5 and its window 1, 2, 3 in any case.
    assert sorted(chosen[0, 0, 2].tolist()) == [MISSING, MISSING, 4]
    assert (chosen[1, 0, :2] == MISSING).all()


def test_a_block_reads_its_window_the_ends_and_its_random_blocks():
    size, blocks = 4, 16
    module = layer("bigbird", block_size=size, random_blocks=2)
    seen = weights_of(module, size * blocks) > 0
    by_block = seen.unflatten(1, (blocks, size)).unflatten(3, (blocks, size))
    read = by_block.any(4).any(2)
    assert torch.equal(by_block.all(4).all(2), read), "blocks are read as a whole"
    for head in read:
        assert head[[0, -1]].all()
        for block in range(1, blocks - 1):
            fixed = {0, blocks - 1, block - 1, block, block + 1}
            found = set(head[block].nonzero().flatten().tolist())
            assert fixed <= found
            assert len(found - fixed) == 2
    assert not torch.equal(read[0], read[1]), "heads have their own"


def test_random_blocks_stay_the_same_in_training_and_after_a_restart():
    module, again, other = layer("bigbird", block_size=2), layer("bigbird", block_size=2), layer("bigbird", 1)
    other.bigbird = module.bigbird
    before = weights_of(module, 64)
    redraw(module, 7)
    assert torch.equal(weights_of(module, 64), before)
    assert torch.equal(weights_of(again, 64), before)
    assert not torch.equal(weights_of(other, 64) > 0, before > 0)
    other.load_state_dict(module.state_dict())
    assert torch.equal(weights_of(other, 64), before), "a checkpoint holds them"


# Informer


def test_the_number_of_queries_grows_with_the_logarithm_of_real_tokens():
    lengths = [1, 2, 3, 20, 21, 1000, 4096]
    numbers = [Informer(factor=5).number(length) for length in lengths]
    assert numbers == [1, 2, 3, 15, 20, 35, 45]
    assert chosen_numbers(torch.tensor(lengths), 5, None).tolist() == numbers
    assert chosen_numbers(torch.tensor([0, 3, 50]), 5, 8).tolist() == [1, 3, 8]


def test_the_queries_that_attend_are_those_with_the_largest_measure():
    length, top = 30, 6
    module = layer("informer", top=top)
    q, k, _ = qkv(length)
    scores = (q @ k.transpose(-1, -2))[0] * WIDTH**-0.5
    keys = module.draws.at(torch.arange(length), top) * length >> 31
    of_sample = scores.gather(2, keys)
    measure = of_sample.amax(2) - of_sample.mean(2)
    weights = weights_of(module, length)
    for head in range(HEADS):
        attending = measure[head].topk(top).indices
        torch.testing.assert_close(weights[head, attending], scores[head, attending].softmax(-1))
        others = torch.ones(length, dtype=torch.bool).index_fill(0, attending, False)
        torch.testing.assert_close(
            weights[head, others], torch.full((length - top, length), 1 / length).double()
        )


# Reformer


def test_no_token_attends_to_itself_unless_it_is_alone():
    module = layer("reformer", chunk_size=4, buckets=8)
    weights = weights_of(module, 37)
    assert not weights.diagonal(dim1=1, dim2=2).any()
    assert weights_of(module, 1).eq(1).all()


def test_tokens_of_one_direction_attend_to_each_other():
    """They hash alike whatever the rotation, and those of the opposite direction otherwise: each has its chunk."""
    draw = torch.Generator().manual_seed(0)
    sign = torch.where(torch.arange(32) % 2 == 0, 1.0, -1.0)[:, None]
    lengths = 1 + torch.rand(32, 1, generator=draw, dtype=torch.float64)
    q = (torch.randn(WIDTH, generator=draw, dtype=torch.float64) * sign * lengths).expand(1, HEADS, -1, -1)
    module = layer("reformer", chunk_size=16, rounds=3)
    weights = module(q, q, torch.eye(32, dtype=q.dtype).expand(1, HEADS, -1, -1))[0]
    alike = (sign == sign.T) & ~torch.eye(32, dtype=torch.bool)
    assert (weights[:, alike] > 0).all()


# All three


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("length", [2, 19, 64])
def test_few_tokens_have_softmax_attention(preset, length):
    module, (q, k, v) = layer(preset, **({"top": 64} if preset == "informer" else {})), qkv(length)
    bias = None
    if preset == "reformer":
        k, bias = (
            F.normalize(q, dim=-1) * WIDTH**0.5,
            torch.full((length,), -torch.inf).double().diag().nan_to_num(0.0, neginf=-torch.inf),
        )
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(module(q, k, v), expected)


@pytest.mark.parametrize("preset", ["informer", "reformer"])
def test_draws_change_in_every_training_step_and_equal_those_of_a_resumed_run(preset):
    settings = {"top": 3} if preset == "informer" else {"chunk_size": 4}
    module, resumed, inputs = layer(preset, **settings), layer(preset, **settings), qkv(48)
    first = module(*inputs)
    redraw(module, 1)
    second = module(*inputs)
    assert not torch.equal(second, first)
    assert torch.equal(module.eval()(*inputs), second), "evaluation keeps the last"
    redraw(resumed, 1)
    assert torch.equal(resumed(*inputs), second)


@pytest.mark.parametrize("preset", PRESETS)
def test_memory_grows_linearly(preset):
    """Numbers that autograd saves; Informer's grow with N log N, by its number of queries."""
    settings = {"informer": {"top": 16}, "bigbird": {"block_size": 8}, "reformer": {"chunk_size": 8}}[preset]
    module, saved = layer(preset, **settings), {}
    for length in (512, 1024):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x
        ):
            mask = torch.arange(length)[None] < length - 5
            module(*(x.requires_grad_() for x in qkv(length)), AttentionInputs(padding_mask=mask))
        saved[length] = sum(sizes)
    assert saved[1024] < 2.05 * saved[512]

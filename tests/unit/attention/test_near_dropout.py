"""Near windows that are shut for some heads of a step."""

import pytest
import torch

from megakernel import attention
from megakernel.attention import HeadShard, redraw

TREE = {"preset": "flurka", "compression": {"block_size": 4, "rank": 2}}
HEADS, TOKENS, DIM = 8, 14, 4


def layer(join="gated", gate="token", heads=attention.ALL_HEADS, probability=0.5):
    core = attention.build(
        {**TREE, "near": {"join": join, "gate": gate}}, num_heads=HEADS, head_dim=DIM, seed=3, heads=heads
    ).double()
    core.drop_near(lambda step: probability, (5, 1))
    return core


def tokens():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, HEADS, TOKENS, DIM, generator=draw, dtype=torch.float64).requires_grad_()


def shut_heads(core, step):
    redraw(core, step)
    return core.near_dropout.dropped.clone()


@pytest.mark.parametrize("gate", ["token", "head"])
def test_a_shut_head_sees_the_far_part_alone_where_there_is_one(gate):
    core, (q, k, v) = layer(gate=gate), tokens()
    shut = shut_heads(core, 1)
    assert 0 < shut.sum() < HEADS
    out = core(q, k, v)
    open_out = core.eval()(q, k, v)
    assert torch.equal(out[:, ~shut], open_out[:, ~shut])
    # The first block sees nothing far.
    assert torch.equal(out[:, :, :4], open_out[:, :, :4])
    with torch.no_grad():
        core.gate_bias.fill_(-1e4)
    torch.testing.assert_close(out[:, shut], core(q, k, v)[:, shut], rtol=1e-14, atol=0)
    assert not torch.equal(out[:, shut, 4:], open_out[:, shut, 4:])


def test_tokens_of_a_shut_window_get_no_gradient_of_their_own_block():
    core = layer()
    q, k, v = tokens()
    shut = shut_heads(core, 1)
    (grad,) = torch.autograd.grad(core(q, k, v)[:, :, 12:].sum(), v)
    assert not grad[:, shut, 12:].any()
    assert grad[:, ~shut, 12:].ne(0).all()
    assert grad[:, :, :12].ne(0).all()


def test_heads_are_shut_by_step_as_often_as_asked_on_every_shard_alike():
    core = layer(probability=0.25)
    draws = torch.stack([shut_heads(core, step) for step in range(400)])
    # 3,200 draws: 3.5 standard deviations.
    assert draws.double().mean().item() == pytest.approx(0.25, abs=0.027)
    assert torch.equal(shut_heads(core, 7), draws[7])
    shards = [layer(heads=HeadShard(rank, 2), probability=0.25) for rank in range(2)]
    assert torch.equal(torch.cat([shut_heads(shard, 7) for shard in shards]), draws[7])
    assert not shut_heads(layer(probability=0.0), 7).any()
    assert shut_heads(layer(probability=1.0), 7).all()


def test_no_checkpoint_holds_it():
    assert (
        layer().state_dict().keys()
        == attention.build(TREE, num_heads=HEADS, head_dim=DIM).state_dict().keys()
    )


def test_only_a_gate_can_be_shut():
    with pytest.raises(ValueError, match=r"near.join=shared .* use gated"):
        layer(join="shared")

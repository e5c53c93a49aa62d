"""Dropping the local window of some heads in a step."""

import pytest
import torch

from megakernel import attention
from megakernel.attention import HeadShard, redraw

TREE = {"preset": "flurka", "compression": {"block_size": 4, "rank": 2}}
HEADS, TOKENS, DIM = 8, 14, 4


def layer(join="gated", gate="token", heads=attention.ALL_HEADS, probability=0.5):
    core = attention.build(
        {**TREE, "near": {"join": join, "gate": gate}},
        num_heads=HEADS,
        head_dim=DIM,
        seed=3,
        heads=heads,
        rotary=False,
    ).double()
    core.drop_near(lambda step: probability, (5, 1))
    return core


def tokens():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, HEADS, TOKENS, DIM, generator=draw, dtype=torch.float64).requires_grad_()


def dropped_heads(core, step):
    redraw(core, step)
    return core.near_dropout.dropped.clone()


@pytest.mark.parametrize("gate", ["token", "head"])
def test_a_dropped_head_uses_only_the_far_context_if_there_is_any(gate):
    core, (q, k, v) = layer(gate=gate), tokens()
    dropped = dropped_heads(core, 1)
    assert 0 < dropped.sum() < HEADS
    out = core(q, k, v)
    full_out = core.eval()(q, k, v)
    assert torch.equal(out[:, ~dropped], full_out[:, ~dropped])
    # The first block has no far context.
    assert torch.equal(out[:, :, :4], full_out[:, :, :4])
    with torch.no_grad():
        core.gate_bias.fill_(-1e4)
    torch.testing.assert_close(out[:, dropped], core(q, k, v)[:, dropped], rtol=1e-14, atol=0)
    assert not torch.equal(out[:, dropped, 4:], full_out[:, dropped, 4:])


def test_tokens_get_no_gradient_through_a_dropped_window():
    core = layer()
    q, k, v = tokens()
    dropped = dropped_heads(core, 1)
    (grad,) = torch.autograd.grad(core(q, k, v)[:, :, 12:].sum(), v)
    assert not grad[:, dropped, 12:].any()
    assert grad[:, ~dropped, 12:].ne(0).all()
    assert grad[:, :, :12].ne(0).all()


def test_heads_are_dropped_by_step_and_probability_equally_on_all_shards():
    core = layer(probability=0.25)
    draws = torch.stack([dropped_heads(core, step) for step in range(400)])
    # 3,200 draws: 3.5 standard deviations.
    assert draws.double().mean().item() == pytest.approx(0.25, abs=0.027)
    assert torch.equal(dropped_heads(core, 7), draws[7])
    shards = [layer(heads=HeadShard(rank, 2), probability=0.25) for rank in range(2)]
    assert torch.equal(torch.cat([dropped_heads(shard, 7) for shard in shards]), draws[7])
    assert not dropped_heads(layer(probability=0.0), 7).any()
    assert dropped_heads(layer(probability=1.0), 7).all()


def test_near_dropout_adds_nothing_to_the_state_dict():
    assert (
        layer().state_dict().keys()
        == attention.build(TREE, num_heads=HEADS, head_dim=DIM).state_dict().keys()
    )


def test_near_dropout_needs_a_gated_merge():
    with pytest.raises(ValueError, match=r"near.join=shared .* use gated"):
        layer(join="shared")

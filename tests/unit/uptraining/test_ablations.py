"""Layers without their local window or without their far context."""

import pytest
import torch

from megakernel import attention
from megakernel.attention import AttentionInputs
from megakernel.uptraining.ablations import SINKS, SinkWindow, as_sliding_window, without_far, without_near
from tests.unit.generation.small_models import build

BLOCK, TOKENS = 4, 14
BLOCKS = {"compression": {"block_size": BLOCK, "rank": 2}}
LAYERS = {
    "gated": {"preset": "flurka", **BLOCKS},
    "gated per head": {"preset": "flurka", **BLOCKS, "near": {"gate": "head"}},
    "shared": {"preset": "flurka", **BLOCKS, "near": {"join": "shared"}},
    "kernel": {"preset": "flurka_kernel", **BLOCKS},
}
PACKED = torch.cat([torch.arange(9), torch.arange(5)])[None]


@pytest.fixture
def tokens():
    return torch.randn(3, 1, 2, TOKENS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def layer(name):
    """A layer with random parameters."""
    core = attention.build(LAYERS[name], num_heads=2, head_dim=4, rotary=False).double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in core.parameters():
            parameter += torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return core


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "kernel"])
def test_without_far_context_a_layer_is_its_local_window(name, tokens):
    core = layer(name)
    window = attention.build({"preset": "local", "near": {"block_size": BLOCK}}, num_heads=2, head_dim=4)
    assert without_far(core)
    torch.testing.assert_close(core(*tokens), window(*tokens), rtol=1e-13, atol=1e-14)


def test_without_far_context_pure_flurka_is_kernel_attention_within_blocks(tokens):
    core = layer("kernel")
    kernel = attention.build("hedgehog", num_heads=2, head_dim=4).double()
    kernel.projection.load_state_dict(core.projection.state_dict())
    assert without_far(core)
    blocks = torch.arange(TOKENS) % BLOCK
    torch.testing.assert_close(
        core(*tokens), kernel(*tokens, AttentionInputs(positions=blocks[None])), rtol=1e-13, atol=1e-14
    )


@pytest.mark.parametrize("name", ["gated", "gated per head"])
def test_without_the_window_only_tokens_of_earlier_blocks_count(name, tokens):
    core = layer(name)
    q, k, v = tokens
    other = v.clone()
    other[:, :, 12:] += 1
    before = core(q, k, v)
    assert not torch.equal(core(q, k, other)[:, :, 12:], before[:, :, 12:])
    assert without_near(core)
    assert torch.equal(core(q, k, other)[:, :, 12:], core(q, k, v)[:, :, 12:])
    # The first block has no earlier blocks and stays unchanged.
    torch.testing.assert_close(core(q, k, v)[:, :, :BLOCK], before[:, :, :BLOCK])


@pytest.mark.parametrize("name", ["shared", "kernel"])
def test_only_gated_layers_can_drop_their_window(name):
    assert not without_near(layer(name))


@pytest.mark.parametrize("window", [3, TOKENS])
def test_a_sliding_window_sees_the_last_tokens_and_the_attention_sinks(window, tokens):
    q, k, v = tokens
    rotary = attention.Rotary(4)
    out = SinkWindow(window)(q, k[:, :1], v[:, :1], AttentionInputs(positions=PACKED, rotary=rotary))
    one_hot = torch.eye(TOKENS, dtype=torch.float64).expand(1, 1, -1, -1)
    weights = SinkWindow(window)(q, k[:, :1], one_hot, AttentionInputs(positions=PACKED, rotary=rotary))
    for i in range(TOKENS):
        start = 0 if i < 9 else 9
        visible = [j for j in range(start, i + 1) if i - j < window or j - start < SINKS]
        assert weights[0, 0, i].nonzero().flatten().tolist() == visible
    if window == TOKENS:
        softmax = attention.build("softmax", num_heads=2, num_kv_heads=1, head_dim=4)
        expected = softmax(q, k[:, :1], v[:, :1], AttentionInputs(positions=PACKED, rotary=rotary))
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-14)


@torch.no_grad()
def test_a_sliding_window_as_long_as_the_text_changes_no_layer():
    windowed, capped = {"preset": "softmax", "window": 3}, {"preset": "softmax", "softcap": 0.2}
    model = build(attention_pattern=["softmax", windowed, capped], num_layers=3)
    inputs = torch.arange(2 * TOKENS).view(2, -1), PACKED.expand(2, -1)
    before = model.logits(model.hidden(*inputs))
    as_sliding_window(model, TOKENS)
    # Other orders of summation in float32, for logits of magnitude 10.
    torch.testing.assert_close(model.logits(model.hidden(*inputs)), before, rtol=1e-5, atol=1e-5)

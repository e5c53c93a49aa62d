"""FLuRKA eq. 2 in a model: E and F compress a layer's input, and landmarks go through its projections."""

import pytest
import torch

from megakernel.config import Model
from megakernel.model.self_attention import SelfAttention
from megakernel.model.settings import ModelSettings

TOKENS, WIDTH, HEADS, SIZE = 9, 12, 2, 6


def phi(x):
    return torch.nn.functional.elu(x) + 1


SCORES = {
    "linformer": lambda q, k: (q @ k.mT / SIZE**0.5).exp(),
    "flurka_rnn": lambda q, k: phi(q) @ phi(k).mT,
}


@pytest.mark.parametrize("share_kv", [False, True])
@pytest.mark.parametrize("preset", SCORES)
def test_biases_are_added_to_landmarks(preset, share_kv, mesh):
    """Queries X W + b, keys (E X) W + b, values (F X) W + b, and not E (X W + b)."""
    attention = {"preset": preset, "compression": {"rank": 5, "share_kv": share_kv}}
    sizes = {"num_layers": 1, "hidden_size": WIDTH, "num_heads": HEADS, "max_positions": TOKENS}
    model = Model.model_validate(
        {**sizes, "position": "none", "kind": "masked_lm", "attention": attention, "qkv_bias": True}
    )
    layer = SelfAttention(ModelSettings(model, 8, mesh), 0).double()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (layer.qkv.weight, layer.qkv.bias):
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 3)
    hidden = torch.randn(TOKENS, 2, WIDTH, generator=draw, dtype=torch.float64)
    found, _ = layer(hidden, torch.arange(TOKENS).expand(2, -1))

    x, pools = hidden.transpose(0, 1), layer.core.compressor.pools(hidden)
    q, k, v = (
        torch.einsum("bnc,hdc->bhnd", source, weight) + bias[:, None]
        for source, weight, bias in zip(
            (x, pools[0].double() @ x, pools[-1].double() @ x),
            layer.qkv.weight.view(HEADS, 3, SIZE, WIDTH).unbind(1),
            layer.qkv.bias.view(HEADS, 3, SIZE).unbind(1),
            strict=True,
        )
    )
    scores = SCORES[preset](q, k)
    heads = (scores / scores.sum(-1, keepdim=True)) @ v
    expected = heads.permute(2, 0, 1, 3).flatten(2) @ layer.output.weight.T
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

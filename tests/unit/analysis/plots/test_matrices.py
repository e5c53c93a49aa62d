"""Attention matrices times the values give the layer's output."""

import pytest
import torch

from megakernel.analysis.plots.matrices import attention_matrix, exact_matrix
from megakernel.analysis.plots.subject import captured_attention, first_sequence

from .small_models import LENGTH, layer_inputs, small_model

BLOCKS = {"compression": {"block_size": 4, "rank": 2}}
RANK = {"compression": {"rank": 6}}
DECODERS = {
    "softmax": "softmax",
    "flurka": {"preset": "flurka", **BLOCKS},
    "linformer_causal": {"preset": "linformer_causal", **BLOCKS},
    "gmm_prf": "gmm_prf",
    "mgk": "mgk",
    "smlk": "smlk",
    "kernelized": "kernelized",
    "eva": {"preset": "eva", "eva": {"window_size": 4, "chunk_size": 2}},
}
ENCODERS = {
    "flurka_rnn": {"preset": "flurka_rnn", **RANK},
    "flurka_eva": {"preset": "flurka_eva", **RANK, "eva": {"window_size": 4}},
    "linformer": {"preset": "linformer", **RANK},
    "skyformer": {"preset": "skyformer", "skyformer": {"features": 8}},
    "nystromformer": {"preset": "nystromformer", "nystromformer": {"landmarks": 4}},
}
MODELS = [(name, config, "causal_lm") for name, config in DECODERS.items()]
MODELS += [(name, config, "masked_lm") for name, config in ENCODERS.items()]


def values_of_tokens(model, layer, captured, row):
    """Values (H, N, D) of all tokens, even if the layer itself computes only those of landmarks."""
    if not captured.core.compresses_input:
        return captured.inputs.v[0].repeat_interleave(captured.inputs.group, 0)
    attention = model.layers[1 + layer].self_attention
    layer_inputs = row
    for part in model.layers[: 1 + layer]:
        layer_inputs = part(layer_inputs)
    hidden = model.layers[1 + layer].attention_norm(layer_inputs[0])
    weight = attention.qkv.weight.unflatten(0, (attention.kv_heads, -1, attention.head_dim))[:, -1]
    values = torch.einsum("nbc,hdc->hnd", hidden, weight)
    return values.repeat_interleave(attention.per_key_head[0], 0)


@pytest.mark.parametrize(("name", "config", "kind"), MODELS, ids=[name for name, _, _ in MODELS])
def test_the_attention_matrix_times_the_values_is_the_output(name, config, kind):
    model = small_model(config, kind=kind)
    row = first_sequence(layer_inputs(), LENGTH)
    layers = captured_attention(model, row)
    assert list(layers) == [0, 1]
    with torch.no_grad():
        for layer, captured in layers.items():
            values = values_of_tokens(model, layer, captured, row)
            for weights in (attention_matrix(captured), exact_matrix(captured).float()):
                scale = captured.output.abs().max()
                assert weights.shape == (4, LENGTH, LENGTH)
                torch.testing.assert_close(
                    weights @ values, captured.output[0], rtol=0, atol=2e-5 * scale.item()
                )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_causal_matrix_has_no_weight_on_later_tokens_or_other_documents():
    captured = captured_attention(small_model(DECODERS["flurka"]), first_sequence(layer_inputs(), LENGTH))[0]
    weights = attention_matrix(captured)
    assert not weights.triu(1).any()
    assert not weights[:, 9:, :9].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, LENGTH))


def test_first_sequence_removes_padding_and_restarts_positions():
    tokens = torch.arange(8)[None].repeat(2, 1)
    positions = torch.tensor([[-1, 5, 6, -1, 0, 1, 2, 3], [0] * 8])
    row_tokens, row_positions = first_sequence((tokens, positions), 5)
    assert row_tokens.tolist() == [[1, 2, 4, 5, 6]]
    assert row_positions.tolist() == [[0, 1, 0, 1, 2]]


def test_capturing_attention_restores_the_model():
    model = small_model("softmax").train()
    model.layers[0].eval()
    shards = [model.layers[1].self_attention.cp_shard, model.layers[2].self_attention.cp_shard]
    captured_attention(model, first_sequence(layer_inputs(), LENGTH))
    assert [part.training for part in model.layers[:3]] == [False, True, True]
    assert [model.layers[1].self_attention.cp_shard, model.layers[2].self_attention.cp_shard] == shards
    assert not any(module._forward_hooks for module in model.modules())

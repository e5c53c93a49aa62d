"""Decoding token by token from the state equals the parallel forward over the whole text."""

import pytest
import torch
from torch.utils import _pytree as pytree

from megakernel import attention
from megakernel.config import PRESETS, Attention, expand_preset
from megakernel.generation.decoding import Decoder
from tests.unit.generation.small_models import BLOCKS, MIXED, build

EOD = 60
DECODERS = [name for name in PRESETS if not Attention(**expand_preset(name)).mixes_future_tokens]
ATTENTION = {name: name for name in DECODERS} | {
    "flurka": {"preset": "flurka", **BLOCKS},
    "flurka_decay": {"preset": "flurka_decay", **BLOCKS},
    "flurka_two_blocks": {
        "preset": "flurka",
        **BLOCKS,
        "near": {"blocks": 2, "join": "shared"},
        "far_rope": "centroid",
    },
    "flurka_kernel": {"preset": "flurka_kernel", **BLOCKS},
    "flurka_mixture": {"preset": "flurka", **BLOCKS, "mixture": {}},
    "local": {"preset": "local", "near": {"block_size": 8}},
}


def is_recurrent(name):
    return attention.build(ATTENTION[name], num_heads=4, head_dim=8).is_recurrent


PARTS = {
    **{name: {"attention": tree} for name, tree in ATTENTION.items()},
    "mixed": {"attention_pattern": MIXED, "num_layers": 4},
    "learned positions, tied": {
        "attention": "softmax",
        "position": "learned",
        "max_positions": 64,
        "norm": "layernorm",
        "activation": "gelu",
        "bias": True,
        "qkv_bias": True,
    },
    "untied": {"attention": ATTENTION["flurka"], "tie_embeddings": False, "qk_norm": True},
    "no positions": {"attention": ATTENTION["flurka"], "position": "none", "qkv_bias": True},
    "as gemma": {
        "attention": {"preset": "softmax", "window": 7, "softcap": 1.0},
        "attention_pattern": ["main", {"preset": "softmax", "softcap": 1.0}],
        "rope_pattern": ["local", "main"],
        "local_rope": {"base": 100.0},
        "rope_scaling": {"kind": "linear", "factor": 2.0},
        "activation": "geglu_tanh",
        "norm_placement": "both",
        "zero_centered_norm": True,
        "qk_norm": True,
        "embedding_multiplier": 32**0.5,
        "attention_multiplier": 0.3,
        "final_logit_softcapping": 2.0,
    },
    "as olmo, granite and smollm": {
        "attention": ATTENTION["flurka"],
        "attention_pattern": ["main", "softmax"],
        "rope_pattern": ["main", "none"],
        "norm_placement": "after",
        "qk_norm": True,
        "qk_norm_width": "all",
        "bias": True,
        "mlp_bias": False,
        "qkv_bias": True,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.2,
        "logits_scaling": 8.0,
        "rope_scaling": {
            "kind": "longrope",
            "original_seq_len": 8,
            "seq_len": 64,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 2.0, 3.0, 4.0],
            "factor": 4.0,
        },
    },
}
"""Model sections of causal language models."""


def parallel_logits(model, tokens, positions):
    layer_inputs = (torch.tensor([tokens]), torch.tensor([positions]))
    with torch.no_grad():
        for layer in model.layers[:-1]:
            layer_inputs = layer(layer_inputs)
        return model.logits(layer_inputs[0])[0]


def text(count):
    return torch.randint(EOD, (count,), generator=torch.Generator().manual_seed(9)).tolist()


def greedy(model, prompt, count):
    """The prompt with greedily chosen tokens, and the logits from which they were chosen."""
    decoder = Decoder(model, EOD, isolate_documents=True, chunk_size=16)
    tokens, logits = list(prompt), []
    logits.append(decoder.read([prompt])[0])
    for _ in range(count):
        tokens.append(int(logits[-1][:EOD].argmax()))
        logits.append(decoder.read([tokens[-1:]])[0])
    return tokens, torch.stack(logits)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_greedy_decoding_equals_the_parallel_forward(mesh, parts):
    model = build(mesh, **parts)
    prompt = text(37)  # read in chunks of 16, 16 and 5, so not in whole blocks
    tokens, logits = greedy(model, prompt, 20)
    expected = parallel_logits(model, tokens, list(range(len(tokens))))[len(prompt) - 1 :]
    # Logits of order 1 in float32, summed in another order.
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert expected[:-1, :EOD].argmax(1).tolist() == tokens[len(prompt) :]


def state_numel(decoder):
    leaves = pytree.tree_leaves(decoder.states)
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


def decoder_after(model, count):
    decoder = Decoder(model, EOD, isolate_documents=True)
    for token in text(count):
        decoder.read([[token]])
    return decoder


@pytest.mark.parametrize("name", [name for name in ATTENTION if is_recurrent(name)])
def test_a_recurrent_state_does_not_grow(mesh, name):
    model = build(mesh, attention=ATTENTION[name], num_layers=1)
    assert state_numel(decoder_after(model, 10)) == state_numel(decoder_after(model, 150))


def test_a_state_leaves_the_device_and_comes_back(mesh):
    decoder = decoder_after(build(mesh, attention_pattern=MIXED, num_layers=4), 20)
    away = decoder.extract(0, "meta")
    of_text, moved = (pytree.tree_leaves(x.states) for x in (decoder, away))
    assert [getattr(x, "shape", x) for x in moved] == [getattr(x, "shape", x) for x in of_text]
    assert {x.device.type for x in moved if isinstance(x, torch.Tensor)} == {"meta"}
    assert {x.device for x in pytree.tree_leaves(decoder.extract(0, "cpu").extract(0).states)} == {
        torch.device("cpu")
    }


def test_a_softmax_layer_caches_its_keys_and_values(mesh):
    model = build(mesh, attention="softmax", num_layers=1)
    key_and_value = 2 * 2 * 8
    assert state_numel(decoder_after(model, 50)) - state_numel(decoder_after(model, 10)) == 40 * key_and_value


@pytest.mark.parametrize("isolate", [True, False])
def test_positions_restart_after_a_document_only_with_isolated_documents(mesh, isolate):
    model = build(mesh, attention_pattern=MIXED, num_layers=4)
    tokens = [*text(10), EOD, *text(9)]
    positions = [*range(11), *range(9)] if isolate else list(range(20))
    logits = Decoder(model, EOD, isolate, chunk_size=7).read([tokens])[0]
    torch.testing.assert_close(logits, parallel_logits(model, tokens, positions)[-1], atol=1e-4, rtol=1e-4)

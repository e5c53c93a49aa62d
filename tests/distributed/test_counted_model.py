"""The parameter and FLOP formulas agree with the model that is built and run."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megakernel.config import Model
from megakernel.model import LanguageModel, ModelSettings
from megakernel.model.flops import forward_flops
from megakernel.model.parameters import parameter_count

from .processes import cpu_mesh, run_ranks

pytestmark = pytest.mark.second

SEQ_LEN, VOCAB = 64, 384
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "max_positions": None}
ENCODER = {"kind": "masked_lm", "max_positions": SEQ_LEN}
MODELS: list[dict[str, Any]] = [
    {"attention": "softmax"},
    {"attention": "softmax", "num_kv_heads": 2, "activation": "gelu", "bias": True, "qkv_bias": True},
    {"attention": "softmax", "tie_embeddings": False, "norm": "layernorm"},
    {"attention": "softmax", "position": "learned", "max_positions": SEQ_LEN},
    {"attention": "hedgehog", "num_kv_heads": 2},
    {"attention": "performer"},
    {"attention": "gmm_rks", "num_kv_heads": 2},
    {"attention": {"preset": "gmm_prf", "feature_map": {"components": 3}}},
    {"attention": {"preset": "fastfood_rks", "feature_map": {"learn": "S"}}},
    {"attention": "generative_prf"},
    {"attention": "gaussian"},
    {"attention": "mgk", "num_kv_heads": 2, "qkv_bias": True},
    {"attention": {"preset": "smgk", "mixture": {"keys": 3, "estep": "hard"}}},
    {"attention": {"preset": "mgk", "mixture": {"m_step": True}}},
    {"attention": "mlk", "num_kv_heads": 1},
    {"attention": {"preset": "smlk", "feature_map": {"name": "hedgehog"}}},
    {"attention": "skyformer", "kind": "masked_lm"},
    {"attention": {"preset": "bigbird", "bigbird": {"block_size": 8}}, "kind": "masked_lm"},
    {"attention": "informer", "kind": "masked_lm", "num_kv_heads": 2},
    {"attention": {"preset": "reformer", "reformer": {"chunk_size": 8}}, "kind": "masked_lm"},
    {"attention": {"preset": "nystromformer", "nystromformer": {"conv_kernel": 5}}, "kind": "masked_lm"},
    {"attention": {"preset": "linformer", "compression": {"rank": 16}}, **ENCODER},
    {"attention": {"preset": "flurka_rnn", "compression": {"rank": 16, "share_kv": True}}, **ENCODER},
    {
        "attention": {"preset": "linformer", "compression": {"rank": 16, "per_head": True}},
        "num_kv_heads": 2,
        **ENCODER,
    },
    {"attention": {"preset": "flurka_eva", "compression": {"rank": 16}}, **ENCODER},
    {"attention": "eva"},
    {"attention": "linformer_causal"},
    {"attention": "local"},
    {"attention": "selected"},
    {"attention": "flurka_selected"},
    {"attention": {"preset": "local", "mixture": {}}},
    {"attention": {"preset": "linformer", "compression": {"rank": 16}, "mixture": {}}, **ENCODER},
    {"attention": {"preset": "linformer_causal", "mixture": {"kind": "shifted", "keys": 3}}},
    {"attention": {"preset": "flurka", "mixture": {}}, "num_kv_heads": 2},
    {"attention": {"preset": "flurka_kernel", "mixture": {"kind": "shifted"}}},
    {"attention": "flurka"},
    {"attention": "flurka_kernel"},
    {"attention": {"preset": "flurka", "near": {"join": "shared"}, "compression": {"per_head": True}}},
    {"attention": {"preset": "flurka", "near": {"gate": "head"}}, "attention_pattern": ["main", "softmax"]},
    {"attention": "linear", "kind": "masked_lm", "tie_embeddings": False, "position": "sinusoidal"},
    {"attention": "linear", "kind": "classifier", "classifier": {"num_classes": 5}},
    {
        "attention": "linear",
        "kind": "classifier",
        "classifier": {"num_classes": 5, "documents": 2, "head": "mlp"},
    },
]


def parameters_and_flops(models: list[Model]) -> list[tuple[int, int]]:
    counted = []
    with cpu_mesh() as mesh:
        for model in models:
            built = LanguageModel(ModelSettings(model, VOCAB + model.special_ids, mesh))
            documents = 1 if model.classifier is None else model.classifier.documents
            tokens = torch.zeros(documents, SEQ_LEN, dtype=torch.long)
            labels = tokens if model.classifier is None else tokens[0, :1]
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                built(tokens, torch.arange(SEQ_LEN).expand(documents, -1), labels, torch.ones(1))
            parameters = {id(p): p.numel() for p in built.parameters()}
            counted.append((sum(parameters.values()), counter.get_total_flops()))
    return counted


@pytest.fixture(scope="module")
def counted() -> list[tuple[Model, int, int]]:
    models = [Model.model_validate({**SIZES, **changes}) for changes in MODELS]
    [results] = run_ranks(parameters_and_flops, 1, models)
    return [(model, *result) for model, result in zip(models, results)]


def test_the_parameter_formula_is_exact_for_every_architecture(counted):
    for model, parameters, _ in counted:
        assert parameter_count(model, VOCAB, SEQ_LEN) == parameters, model


def test_a_softmax_model_executes_the_formulas_projections_mlps_and_head(counted):
    """torch's counter does not know the fused softmax kernel of CPUs, so it counts everything else."""
    softmax = [entry for entry in counted if entry[0].attention.is_plain_softmax]
    assert softmax
    for model, _, executed in softmax:
        parts = forward_flops(model, SEQ_LEN, VOCAB)
        assert executed == SEQ_LEN * (parts["projections"] + parts["mlp"] + parts["head"]), model


def test_every_architecture_executes_at_least_the_flops_of_the_formula(counted):
    for model, _, executed in counted:
        layers = [model.layer_attention(layer) for layer in range(model.num_layers)]
        if not any(layer.is_plain_softmax for layer in layers):
            parts = forward_flops(model, SEQ_LEN, VOCAB)
            if any(layer.similarity == "softmax" and layer.near is None for layer in layers):
                parts.pop("far", None)  # the fused softmax again, over landmarks
            if any(layer.selection is not None and layer.compression is None for layer in layers):
                parts.pop("near")  # and over a window with the chosen blocks
            parts.pop("chosen", None)
            assert executed >= SEQ_LEN * sum(parts.values()), model

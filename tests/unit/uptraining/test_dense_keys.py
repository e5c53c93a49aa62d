"""Every key of a config.json means the same as in `transformers`, compared by logits."""

import json
from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from launch.cli import main
from megakernel.checkpoint import parity as comparison
from megakernel.checkpoint.dense import FAMILIES, DenseCheckpoint
from megakernel.checkpoint.dense.families import COMMON_KEYS, SUPPORTED_VALUES
from megakernel.checkpoint.parity import folder_parity
from megakernel.config import UserError
from tests import dense_models

EXAMPLES = {
    "llama": "llama",
    "mistral": "mistral, sliding",
    "qwen2": "qwen2, some layers slide",
    "qwen3": "qwen3, tied",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
    "olmo3": "olmo3, some layers slide",
    "phi3": "phi3, sliding",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
    "gpt_neox": "gpt_neox",
    "stablelm": "stablelm",
}
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Family -> folder of its example model."""
    folders = {family: tmp_path_factory.mktemp(family) for family in EXAMPLES}
    for family, name in EXAMPLES.items():
        dense_models.save(name, folders[family])
    return folders


@pytest.fixture
def changed(saved, tmp_path):
    """Returns a function that copies a family's example and changes keys of its config.json."""

    def make(family, **keys):
        for file in saved[family].iterdir():
            (tmp_path / file.name).unlink(missing_ok=True)
            (tmp_path / file.name).symlink_to(file)
        config = json.loads((saved[family] / "config.json").read_text()) | keys
        (tmp_path / "config.json").unlink()
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


def difference(folder):
    return folder_parity(DenseCheckpoint(folder), "init.from", torch.device("cpu")).difference


OTHER_VALUES = {
    # names and classes
    "architectures": ["OtherForCausalLM"],
    "id2label": {"0": "a"},
    "label2id": {"a": 0},
    "problem_type": "regression",
    "transformers_version": "4.0.0",
    "dtype": "bfloat16",
    # training and generation
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 7),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "classifier_dropout"), 0.5),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"), 0.5),
    "use_cache": False,
    "return_dict": False,
    "output_hidden_states": True,
    "chunk_size_feed_forward": 3,
    "is_encoder_decoder": True,
    "is_decoder": True,
    "pretraining_tp": 2,
    "reorder_and_upcast_attn": True,
    "summary_type": "last",
    "summary_use_proj": False,
    "summary_activation": "tanh",
    "summary_proj_to_labels": False,
    # keys that a family's configuration completes
    "use_sliding_window": True,
    "max_window_layers": 1,
    # sizes, in families that do not use them
    "head_dim": 4,
    "num_key_value_heads": 1,
    "n_inner": 7,
    "n_embd": 7,
    "n_head": 1,
    "n_layer": 1,
    "n_positions": 7,
    "intermediate_size": 7,
    "layer_norm_eps": 0.1,
    "layer_norm_epsilon": 0.1,
    "rms_norm_eps": 0.1,
    "hidden_act": "relu",
    "activation_function": "relu",
    # keys that change the function
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"],
    "attention_chunk_size": 3,
    "use_parallel_residual": False,
    "use_qkv_bias": True,
    "qk_layernorm": True,
    "scale_attn_weights": False,
    "scale_attn_by_inverse_layer_idx": True,
    "add_cross_attention": True,
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.5,
    "rope_theta": 7.0,
    "rotary_emb_base": 7.0,
    "original_max_position_embeddings": 8,
    "max_position_embeddings": dense_models.LENGTH,
    "rope_scaling": None,
    "logit_scale": 0.5,
    "no_rope_layers": [0, 1],
    "no_rope_layer_interval": 1,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.7,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "hidden_activation": "relu",
    "query_pre_attn_scalar": 7,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 1.5,
    "use_bidirectional_attention": True,
}
SIZES = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}


@every_family
def test_every_key_of_a_family_is_read_or_has_no_effect(family):
    known = [*COMMON_KEYS, *SUPPORTED_VALUES, *FAMILIES[family].keys]
    assert len(known) == len(set(known))
    declared = {field.name for field in fields(CONFIG_MAPPING[family])}
    assert declared <= {*known, *OTHER_VALUES}, "the next test shows that keys without effect have none"


@every_family
def test_keys_that_a_family_does_not_read_have_no_effect_in_either_implementation(family, changed):
    """All such keys at once: the family's own, and those of all other families."""
    read = {
        *COMMON_KEYS,
        *SUPPORTED_VALUES,
        *FAMILIES[family].keys,
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
    }
    # From these, a family's configuration derives keys that it reads: sliding_window, layer_types.
    completed = {"use_sliding_window", "max_window_layers"} if family.startswith("qwen") else set()
    if family == "mistral":
        completed.add("layer_types")  # which would make it another family
    if family in ("olmo3", "gemma3_text"):
        completed.add("partial_rotary_factor")  # refused with scaled frequencies, which do not ignore it
    completed |= {"rotary_pct", "rotary_emb_base", "rope_theta", "rope_scaling"}
    stray = {key: value for key, value in OTHER_VALUES.items() if key not in read | completed}
    everything = {key for each in FAMILIES.values() for key in each.keys}
    assert everything <= {*OTHER_VALUES, *SIZES, "rope_parameters"}
    plain, folder = DenseCheckpoint(changed(family)).model, changed(family, **stray)
    assert DenseCheckpoint(folder).model == plain
    assert difference(folder) < 1e-5


@every_family
def test_keys_that_a_family_reads_mean_the_same_or_are_refused(family, changed):
    given = json.loads((changed(family) / "config.json").read_text())
    compared = []
    for key in {
        *FAMILIES[family].keys,
        "tie_word_embeddings",
        "partial_rotary_factor",
        "rotary_pct",
        "rope_theta",
    }:
        if key in SIZES | {"rope_parameters"}:
            continue
        value = (not given[key]) if isinstance(given.get(key), bool) else OTHER_VALUES.get(key, 7)
        try:
            found = difference(changed(family, **{key: value}))
        except UserError:
            continue
        assert found < 1e-5, key
        compared.append(key)
    assert len(compared) >= 4


YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
BETWEEN_PAIRS = YARN | {"beta_slow": 0.25, "truncate": False}
OF_EACH_TYPE = {"full_attention": BETWEEN_PAIRS, "sliding_attention": YARN | {"factor": 2.0}}


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {"sliding_window": 4}),
        ("llama", {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("mistral", {"use_sliding_window": False}),
        ("mistral", {"attention_bias": True}),
        ("qwen2", {"attention_bias": False}),
        ("qwen2", {"use_sliding_window": False, "layer_types": None}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}),
        ("gpt_neox", {"rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 77.0}),
        ("gpt_neox", {"partial_rotary_factor": 1.0}),
        ("llama", {"rope_parameters": YARN | {"low_freq_factor": 3.0, "truncate": True, "mscale": 2.0}}),
        ("llama", {"rope_parameters": YARN, "original_max_position_embeddings": 32}),
        ("llama", {"rope_parameters": YARN | {"beta_fast": 4, "beta_slow": 2, "attention_factor": 1.5}}),
        ("llama", {"return_dict": False}),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
        ("llama", {"rope_parameters": BETWEEN_PAIRS}),
        ("llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 2.0}}),
        (
            "llama",
            {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 2.0, "attention_factor": 1.5}},
        ),
        ("olmo3", {"rope_parameters": OF_EACH_TYPE}),
        ("gpt_neox", {"use_parallel_residual": False}),
        ("gemma", {"hidden_act": "gelu"}),
        ("stablelm", {"rope_parameters": None, "partial_rotary_factor": 0.5, "rope_theta": 77.0}),
        ("stablelm", {"hidden_act": "gelu_pytorch_tanh"}),
    ],
)
def test_special_keys_are_read_as_by_transformers(family, keys, changed):
    assert difference(changed(family, **keys)) < 1e-5


@pytest.mark.parametrize(
    ("family", "keys", "text"),
    [
        ("llama", {"is_causal": False}, "is_causal=False has no counterpart here; only True is read"),
        ("llama", {"per_layer_config": {"0": {"rms_norm_eps": 0.5}}}, "per_layer_config"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
        ("llama", {"transformers_weights": "other.safetensors"}, "transformers_weights="),
        (
            "mistral",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "model_type='ministral' is not supported",
        ),
        ("gpt_neox", {"head_dim": 32}, "head_dim=32 has no counterpart here; only 8 is read"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True has no counterpart"),
        ("stablelm", {"head_dim": 32}, "head_dim=32 has no counterpart here; only 8 is read"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm=True has no counterpart"),
        ("stablelm", {"use_parallel_residual": True}, "use_parallel_residual=True has no counterpart"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True has no counter"),
        ("gemma", {"hidden_act": "relu"}, "only 'silu' or 'gelu_pytorch_tanh' is read"),
        ("llama", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types has 'chunked_attention'; only full_attention and sliding_attention are read",
        ),
        ("qwen2", {"use_sliding_window": False}, "layer_types has 'sliding_attention', and no layer has"),
        (
            "qwen2",
            {"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}},
            "has no rope_theta",
        ),
    ],
)
def test_keys_that_only_transformers_supports_are_refused(family, keys, text, changed):
    with pytest.raises(UserError) as refused:
        DenseCheckpoint(changed(family, **keys))
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)


def write_head(folder, head):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(weights | {"lm_head.weight": head(weights)}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("family", "embedding"), [("qwen3", "model.embed_tokens"), ("gpt2", "transformer.wte")]
)
def test_a_head_that_differs_from_the_embedding_is_not_tied_to_it(family, embedding, changed):
    folder = changed(family)
    write_head(folder, lambda weights: weights[f"{embedding}.weight"].clone())
    assert DenseCheckpoint(folder).model.tie_embeddings
    write_head(folder, lambda weights: weights["lm_head.weight"].flip(0).contiguous())
    assert not DenseCheckpoint(folder).model.tie_embeddings
    assert difference(folder) < 1e-5


def test_import_reports_the_logit_difference_and_writes_nothing_if_large(
    changed, tmp_path, capsys, monkeypatch
):
    folder, to = changed("llama"), tmp_path / "model.yaml"
    assert main(["import", str(folder)]) == 0
    captured = capsys.readouterr()
    assert f"{folder}: logits are those of transformers, at most" in captured.err
    assert captured.out.startswith("# llama from ")
    # Simulates that this package reads the frequencies wrongly.
    monkeypatch.setattr("megakernel.checkpoint.dense.families._rope", lambda config: {"rope_base": 7.0})
    assert main(["import", str(folder), "--to", str(to)]) == 2
    captured = capsys.readouterr()
    assert f"{folder}: logits differ from those of transformers by" in captured.err
    assert not to.exists()


@every_family
def test_check_prints_the_difference_after_each_layer(family, changed, capsys):
    assert main(["import", str(changed(family)), "--check"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    found = {place: float(distance) for place, distance in (line.rsplit(maxsplit=1) for line in lines)}
    assert list(found) == ["embedding", "layer 0", "layer 1 and norm", "logits"]
    assert max(found.values()) < 2e-5


def test_check_shows_the_layer_at_which_a_wrongly_read_model_differs(changed, tmp_path, capsys, monkeypatch):
    folder, frequencies = changed("llama"), {"rope_base": 7.0}
    assert main(["import", str(folder), "--check", "--to", str(tmp_path / "model.yaml")]) == 2
    assert "--check only compares; leave one of them out" in capsys.readouterr().err
    monkeypatch.setattr("megakernel.checkpoint.dense.families._rope", lambda config: frequencies)
    assert main(["import", str(folder), "--check"]) == 2
    captured = capsys.readouterr()
    found = [float(line.rsplit(maxsplit=1)[1]) for line in captured.out.splitlines()[1:]]
    assert found[0] < 1e-6
    assert min(found[1:]) > 1e-3
    assert "logits differ from those of transformers by" in captured.err


def test_only_the_first_layers_of_a_too_large_model_are_compared(changed, monkeypatch):
    checkpoint = DenseCheckpoint(changed("qwen2"))
    whole = comparison.weight_bytes(checkpoint)
    for free, reason in ((2 * whole, ""), (2 * whole - 1, "1 of 2 layers")):
        monkeypatch.setattr(comparison, "free_memory", lambda device, free=free: free)
        found = folder_parity(checkpoint, "init.from", torch.device("cpu"))
        assert found.reason == reason
        assert found.difference < 1e-5
    monkeypatch.setattr(comparison, "free_memory", lambda device: whole)
    found = folder_parity(checkpoint, "init.from", torch.device("cpu"))
    assert found.difference is None
    assert "transformers would need" in found.reason

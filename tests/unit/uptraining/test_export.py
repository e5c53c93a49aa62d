"""Exporting the model of a run as a checkpoint that `transformers` loads."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_pipeline import tokenizers
from data_pipeline.tokenizers import ByteTokenizer
from megakernel.checkpoint import export as exporting
from megakernel.checkpoint.dense import DenseCheckpoint
from megakernel.checkpoint.dense.configs import plain_config
from megakernel.checkpoint.dense.tokenizer import save_tokenizer
from megakernel.checkpoint.export import generation_config
from megakernel.checkpoint.manifest import SavedProgress, write_manifest
from megakernel.checkpoint.opened import OpenedModel
from megakernel.checkpoint.trained_run import TrainedRun
from megakernel.config import Model, UserError, load, to_yaml
from megakernel.config.model import Dropout
from tests import dense_models
from tests.unit.config import trees


@pytest.mark.parametrize("name", dense_models.CONFIGS)
def test_a_plain_configuration_equals_the_one_it_was_read_from(name, tmp_path):
    dense_models.save(name, tmp_path / "in")
    checkpoint = DenseCheckpoint(tmp_path / "in")
    # Training on sequences no longer than the windows does not shorten the exported maximum length.
    written = plain_config(checkpoint.model, checkpoint.model.vocab_size, 8)
    known = type(dense_models.CONFIGS[name]).from_dict(written).to_dict()
    ignored = {"dtype", "architectures", "transformers_version", "use_cache", "model_type"}
    expected = dense_models.CONFIGS[name].to_dict()
    assert written["model_type"] == expected["model_type"]
    different = {key for key in expected if key not in ignored and known.get(key) != expected[key]}
    # Keys that the code of `transformers` does not read for these models.
    unread = {
        "n_inner",
        "pretraining_tp",
        "max_window_layers",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
    if "slid" not in name:
        unread.add("sliding_window")
    if name == "gpt2":  # an import reads no dropout, and an export says what the model was trained with
        unread |= {"attn_pdrop", "embd_pdrop", "resid_pdrop"}
    assert different <= unread


@pytest.mark.parametrize(
    ("name", "dropout", "expected"),
    [
        (
            "gpt2",
            {"residual": 0.1, "embedding": 0.2},
            {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.0},
        ),
        ("gpt2", {}, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
        ("gpt_neox", {"residual": 0.1, "embedding": 0.1}, {"hidden_dropout": 0.1}),
        # One key stands for both places there.
        ("gpt_neox", {"residual": 0.1}, {"hidden_dropout": None}),
        ("phi3, sliding", {"residual": 0.1}, {"resid_pdrop": 0.1}),
        ("llama", {"residual": 0.1}, {"resid_pdrop": None}),
    ],
)
def test_dropout_is_written_where_the_family_has_a_key_for_its_places(name, dropout, expected, tmp_path):
    dense_models.save(name, tmp_path)
    checkpoint = DenseCheckpoint(tmp_path)
    model = checkpoint.model.model_copy(update={"dropout": Dropout(**dropout)})
    written = plain_config(model, model.vocab_size, 8)
    assert {key: written.get(key) for key in expected} == expected


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo3, some layers slide"])
def test_a_plain_configuration_works_without_sliding_layers(name, tmp_path):
    dense_models.save(name, tmp_path)
    config = DenseCheckpoint(tmp_path).config | {"layer_types": ["full_attention"] * 2}
    checkpoint = DenseCheckpoint(tmp_path, config=config)
    written = plain_config(checkpoint.model, checkpoint.model.vocab_size, 8)
    assert written["model_type"] == config["model_type"]
    model = AutoModelForCausalLM.from_config(type(dense_models.CONFIGS[name]).from_dict(written))
    assert model(dense_models.tokens()).logits.shape[-1] == dense_models.VOCABULARY


def test_the_byte_tokenizer_gives_the_same_ids_in_transformers(tmp_path):
    tokenizer = ByteTokenizer()
    save_tokenizer(tokenizer, tmp_path)
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    # It is recognized when loaded, so that data prepared with either is the same.
    assert tokenizers.load(tmp_path).hash == tokenizer.hash
    text = "def f(x):\n\treturn x+1 # 3.14\r\nÀ é ß Ω 漢字 👍🏽   \u00a0 " + "".join(map(chr, range(256)))
    assert hf_tokenizer(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    assert hf_tokenizer.decode(tokenizer.encode(text)) == text
    assert hf_tokenizer.eos_token_id == tokenizer.eod


def test_combinations_that_no_architecture_has_have_no_plain_configuration():
    plain = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "attention": "softmax"}
    assert plain_config(Model(**plain), 384, 64) is not None
    others = (
        {"norm": "layernorm", "mlp_bias": True},
        {"attention_pattern": ["main", "performer"]},
        {"normalized_residual": True},
        # Of Phi-3 alone, which takes no other scaling than longrope.
        {"rotary_share": 0.5, "rope_scaling": {"kind": "linear", "factor": 2.0}},
    )
    for other in others:
        assert plain_config(Model(**plain | other), 384, 64) is None


def test_only_causal_language_models_are_exported(tmp_path, refused):
    run = tmp_path / "run"
    config = trees.file(tmp_path, "base.yaml")
    (run / "checkpoints" / "step_1").mkdir(parents=True)
    masked = load(config, ["model.kind=masked_lm", "model.attention=softmax", "data.masking={}"])
    (run / "config.yaml").write_text(to_yaml(masked))
    progress = SavedProgress(1, 1, 1, {}, {})
    write_manifest(run / "checkpoints" / "step_1", progress, {})
    assert "model.kind=masked_lm" in (error := refused("export", run, "--to", tmp_path / "out"))
    assert "is not exported; give a run of a causal_lm" in error
    assert not (tmp_path / "out").exists()


def generation_settings(folder, *runs, **settings):
    """generation_config.json of the last of `runs`, a chain that starts from a dense model with these settings."""
    (folder / "dense").mkdir()
    (folder / "dense/config.json").write_text('{"model_type": "llama"}')
    (folder / "dense/generation_config.json").write_text(json.dumps(settings))
    source = folder / "dense"
    for run in runs:
        config = trees.config(init={"from": str(source)})
        (folder / run).mkdir()
        (folder / run / "config.yaml").write_text(to_yaml(config))
        source = folder / run
    return generation_config(config, ByteTokenizer(), 260)


OWN_IDS = {"eos_token_id": 256, "pad_token_id": 256, "suppress_tokens": [257, 258, 259]}


def test_decoding_is_greedy_by_default(tmp_path):
    assert generation_config(trees.config(), ByteTokenizer(), 260) == OWN_IDS
    model_defaults = {
        "_from_model_config": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "transformers_version": "5.23.0",
    }
    ids = {"bos_token_id": 1, "eos_token_id": [2, 256]}
    assert generation_settings(tmp_path, "up", **model_defaults, do_sample=True) == OWN_IDS | ids


def test_end_tokens_that_only_the_configuration_names_are_kept(tmp_path):
    """Of a chat model: its end-of-turn token, without which neither an export nor a run ends its turn."""
    generation_settings(tmp_path, "up")
    dense = tmp_path / "dense"
    (dense / "generation_config.json").unlink()
    settings = {"model_type": "llama", "eos_token_id": [7, 9], "pad_token_id": None, "max_length": 20}
    (dense / "config.json").write_text(json.dumps(settings))
    config = load(tmp_path / "up/config.yaml")
    assert generation_config(config, ByteTokenizer(), 260) == OWN_IDS | {"eos_token_id": [7, 9, 256]}
    for model in (
        OpenedModel(dense, None, config, ByteTokenizer()),
        OpenedModel(tmp_path / "up", TrainedRun(config, None), config, ByteTokenizer()),
    ):
        assert model.ends == {7, 9, 256}


def test_generation_settings_of_the_dense_model_are_kept_through_all_stages(tmp_path):
    given = {
        "do_sample": True,
        "temperature": 0.6,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pad_token_id": 0,
    }
    found = generation_settings(
        tmp_path, "1-transfer", "2-main", **given, suppress_tokens=[7], transformers_version="5"
    )
    assert found == given | {"eos_token_id": [2, 3, 256], "suppress_tokens": [7, 257, 258, 259]}
    (tmp_path / "dense/config.json").unlink()  # the dense model was deleted
    last = load(tmp_path / "2-main/config.yaml")
    assert generation_config(last, ByteTokenizer(), 260) == OWN_IDS


def test_an_unreadable_earlier_run_gives_no_generation_settings(tmp_path):
    generation_settings(tmp_path, "first", "second", bos_token_id=1)
    last = load(tmp_path / "second/config.yaml")
    assert generation_config(last, ByteTokenizer(), 260) == OWN_IDS | {"bos_token_id": 1}
    (tmp_path / "first/config.yaml").write_text("of: another version\n")
    assert generation_config(last, ByteTokenizer(), 260) == OWN_IDS


@pytest.mark.parametrize("text", ["[]", '{"bos_token_id": 1', "\x00"])
def test_a_damaged_generation_config_is_refused(text, tmp_path):
    generation_settings(tmp_path, "run", bos_token_id=1)
    (tmp_path / "dense/generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"generation_config.json is no JSON object .*; download it again"):
        generation_config(load(tmp_path / "run/config.yaml"), ByteTokenizer(), 260)


def test_the_bos_token_of_the_tokenizer_is_exported():
    trained = tokenizers.train_bpe(["some words, some more words"] * 9, 270)
    trained._tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer = tokenizers.HuggingFaceTokenizer(trained._tokenizer)
    assert generation_config(trees.config(), tokenizer, 128)["bos_token_id"] == trained.vocab_size


@pytest.mark.parametrize("shard_bytes", [100, 1000])
def test_whoever_may_read_an_exported_configuration_may_read_its_weights(tmp_path, monkeypatch, shard_bytes):
    monkeypatch.setattr(exporting, "SHARD_BYTES", shard_bytes)
    exporting.write_tensors(tmp_path, ((f"t{i}", torch.zeros(10)) for i in range(5)))
    (tmp_path / "config.json").write_text("{}")
    modes = {path.name: oct(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert set(modes.values()) == {modes["config.json"]}
    assert "part-0" not in modes


def test_shards_have_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "SHARD_BYTES", 100)
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}
    exporting.write_tensors(tmp_path, iter(tensors.items()))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])

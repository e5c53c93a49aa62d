"""A run's model comes out as a checkpoint that `transformers` loads, and goes in again."""

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
from megakernel.config import Model, UserError, load, to_yaml
from tests import dense_models
from tests.unit.config import trees


@pytest.mark.parametrize("name", dense_models.CONFIGS)
def test_a_plain_configuration_is_what_it_was_read_from(name, tmp_path):
    dense_models.save(name, tmp_path / "in")
    checkpoint = DenseCheckpoint(tmp_path / "in")
    # A run on shorter sequences, no longer than the windows, unlearns nothing of longer ones.
    written = plain_config(checkpoint.model, checkpoint.model.vocab_size, 8)
    known = type(dense_models.CONFIGS[name]).from_dict(written).to_dict()
    ignored = {"dtype", "architectures", "transformers_version", "use_cache", "model_type"}
    expected = dense_models.CONFIGS[name].to_dict()
    assert written["model_type"] == expected["model_type"]
    different = {key for key in expected if key not in ignored and known.get(key) != expected[key]}
    # What their code does not read of these models.
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
    assert different <= unread


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo3, some layers slide"])
def test_a_plain_configuration_runs_where_no_layer_slides(name, tmp_path):
    dense_models.save(name, tmp_path)
    config = DenseCheckpoint(tmp_path).config | {"layer_types": ["full_attention"] * 2}
    checkpoint = DenseCheckpoint(tmp_path, config=config)
    written = plain_config(checkpoint.model, checkpoint.model.vocab_size, 8)
    assert written["model_type"] == config["model_type"]
    model = AutoModelForCausalLM.from_config(type(dense_models.CONFIGS[name]).from_dict(written))
    assert model(dense_models.tokens()).logits.shape[-1] == dense_models.VOCABULARY


def test_the_byte_tokenizer_gives_the_same_ids_in_transformers(tmp_path):
    ours = ByteTokenizer()
    save_tokenizer(ours, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    # And is known again, so that data prepared with either is the same.
    assert tokenizers.load(tmp_path).hash == ours.hash
    text = "def f(x):\n\treturn x+1 # 3.14\r\nÀ é ß Ω 漢字 👍🏽   \u00a0 " + "".join(map(chr, range(256)))
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eod


def test_parts_that_no_architecture_has_together_have_no_plain_configuration():
    plain = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "attention": "softmax"}
    assert plain_config(Model(**plain), 384, 64) is not None
    others = (
        {"norm": "layernorm"},
        {"attention_pattern": ["main", "performer"]},
        {"normalized_residual": True},
    )
    for other in others:
        assert plain_config(Model(**plain | other), 384, 64) is None


def test_only_a_model_that_continues_text_is_exported(tmp_path, refused):
    run = tmp_path / "run"
    config = trees.file(tmp_path, "base.yaml")
    (run / "checkpoints" / "step_1").mkdir(parents=True)
    masked = load(config, ["model.kind=masked_lm", "model.attention=softmax", "data.masking={}"])
    (run / "config.yaml").write_text(to_yaml(masked))
    progress = SavedProgress(1, 1, 1, {}, {})
    write_manifest(run / "checkpoints" / "step_1", progress, {})
    assert "model.kind=masked_lm" in (said := refused("export", run, "--to", tmp_path / "out"))
    assert "is not exported; give a run of a causal_lm" in said
    assert not (tmp_path / "out").exists()


def chosen(folder, *runs, **settings):
    """generation_config.json of the last of `runs`, the first of which began with a dense model of these settings."""
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


def test_decoding_is_greedy_where_nobody_chose(tmp_path):
    assert generation_config(trees.config(), ByteTokenizer(), 260) == OWN_IDS
    made = {
        "_from_model_config": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "transformers_version": "5.23.0",
    }
    assert chosen(tmp_path, "up", **made) == OWN_IDS


def test_what_was_chosen_for_the_dense_model_goes_through_all_stages(tmp_path):
    given = {
        "do_sample": True,
        "temperature": 0.6,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pad_token_id": 0,
    }
    found = chosen(tmp_path, "1-transfer", "2-main", **given, suppress_tokens=[7], transformers_version="5")
    assert found == given | {"eos_token_id": [2, 3, 256], "suppress_tokens": [7, 257, 258, 259]}
    (tmp_path / "dense/config.json").unlink()  # the dense model has gone since
    last = load(tmp_path / "2-main/config.yaml")
    assert generation_config(last, ByteTokenizer(), 260) == OWN_IDS


def test_a_run_of_a_version_with_other_keys_tells_nothing_of_its_dense_model(tmp_path):
    chosen(tmp_path, "first", "second", bos_token_id=1)
    last = load(tmp_path / "second/config.yaml")
    assert generation_config(last, ByteTokenizer(), 260) == OWN_IDS | {"bos_token_id": 1}
    (tmp_path / "first/config.yaml").write_text("of: another version\n")
    assert generation_config(last, ByteTokenizer(), 260) == OWN_IDS


@pytest.mark.parametrize("text", ["[]", '{"bos_token_id": 1', "\x00"])
def test_a_broken_file_of_the_dense_model_is_told(text, tmp_path):
    chosen(tmp_path, "run", bos_token_id=1)
    (tmp_path / "dense/generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"generation_config.json is no JSON object .*; download it again"):
        generation_config(load(tmp_path / "run/config.yaml"), ByteTokenizer(), 260)


def test_a_text_begins_with_the_token_that_the_tokenizer_has_for_it():
    trained = tokenizers.train_bpe(["some words, some more words"] * 9, 270)
    trained._tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer = tokenizers.HuggingFaceTokenizer(trained._tokenizer)
    assert generation_config(trees.config(), tokenizer, 128)["bos_token_id"] == trained.vocab_size


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

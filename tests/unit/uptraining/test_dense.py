"""Dense checkpoints under megakernel's parameter names, and refused ones."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch.cli import main
from megakernel.checkpoint.dense import FAMILIES, DenseCheckpoint
from megakernel.checkpoint.dense.checkpoint import config_fragment
from megakernel.checkpoint.dense.configs import plain_config
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import UserError, load
from tests import dense_models
from tests.disk import files_of_at_most
from tests.unit.config import trees

every_model = pytest.mark.parametrize("name", dense_models.CONFIGS)


@pytest.fixture
def llama(tmp_path):
    dense_models.save("llama", tmp_path / "llama")
    return tmp_path / "llama"


@every_model
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_every_tensor_round_trips_bit_for_bit(name, shard, tmp_path):
    model = dense_models.save(name, tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    checkpoint = DenseCheckpoint(tmp_path)
    found = {}
    for parameter_name in checkpoint.names:
        tensor = checkpoint.read(parameter_name)["fp32"]
        assert checkpoint.shape(parameter_name) == tensor.shape
        part = checkpoint.parts[parameter_name]
        found |= dict(zip(part.hf_names, part.split(tensor)))
    # The names in memory; a tied head is among them but in no file.
    head = "embed_out.weight" if "neox" in name else "lm_head.weight"
    expected = {head if key == "lm_head.weight" else key: x for key, x in model.state_dict().items()}
    if checkpoint.model.tie_embeddings:
        del expected[head]
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())


@every_model
def test_dtypes_are_kept(name, tmp_path):
    dense_models.dense_model(name).bfloat16().save_pretrained(tmp_path)
    checkpoint = DenseCheckpoint(tmp_path)
    assert {checkpoint.read(key)["fp32"].dtype for key in checkpoint.names} == {torch.bfloat16}


def test_import_writes_a_configuration_that_a_run_extends(llama, tmp_path, capsys):
    base = trees.file(tmp_path, "base.yaml")
    assert main(["import", str(llama), "--to", str(tmp_path / "model.yaml")]) == 0
    output = capsys.readouterr().out
    count = sum(x.numel() for x in dense_models.dense_model("llama").parameters())
    assert f"llama, {count:,} parameters, all tensors present" in output
    (tmp_path / "run.yaml").write_text(f"extends: [{base.name}, model.yaml]")
    config = load(tmp_path / "run.yaml")
    assert config.init.source == llama
    assert DenseCheckpoint(llama).differing_keys(config.model) == []
    assert (config.model.num_layers, config.model.vocab_size) == (2, dense_models.VOCABULARY)


def test_import_says_that_it_reads_no_dropout(llama, tmp_path, capsys):
    """Of a checkpoint that has some; the run takes it from model.dropout."""
    checkpoint = DenseCheckpoint(llama, config=DenseCheckpoint(llama).config | {"attention_dropout": 0.1})
    text = config_fragment(checkpoint)
    assert "# dropout is not read (attention_dropout=0.1): runs have none, or that of model.dropout" in text
    assert not checkpoint.model.dropout.any
    assert main(["import", str(llama), "--to", str(tmp_path / "model.yaml")]) == 0
    assert "dropout is not read" not in (tmp_path / "model.yaml").read_text() + capsys.readouterr().out


def test_import_overwrites_nothing(llama, tmp_path, capsys):
    mine, folder, plain = tmp_path / "mine.yaml", tmp_path / "folder", tmp_path / "plain"
    for path in (mine, plain):
        path.write_text("mine: 1\n")
    folder.mkdir()
    for existing in (mine, folder):
        assert main(["import", str(llama), "--to", str(existing)]) == 2
        error = f"megakernel: error: --to {existing} exists already; name a new file, or remove it\n"
        assert capsys.readouterr().err.endswith(error)
    # A file where a folder is needed, and a full disk.
    for to, space in ((plain / "model.yaml", 10_000), (tmp_path / "new.yaml", 100)):
        with files_of_at_most(space):
            assert main(["import", str(llama), "--to", str(to)]) == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert line.startswith(f"megakernel: error: --to {to} cannot be written (")
        assert line.endswith("choose another --to")
    assert mine.read_text() == plain.read_text() == "mine: 1\n"
    assert sorted(tmp_path.iterdir()) == [folder, llama, mine, plain]


def test_every_differing_model_key_is_named(llama):
    checkpoint = DenseCheckpoint(llama)
    other = checkpoint.model.model_copy(update={"norm_eps": 0.5, "activation": "gelu", "rope_base": 7.0})
    assert checkpoint.differing_keys(other) == [
        "model.activation='gelu' is 'swiglu' in the checkpoint; set it to that",
        "model.norm_eps=0.5 is 1e-06 in the checkpoint; set it to that",
    ]
    other = checkpoint.model.model_copy(update={"head_dim": 2 * checkpoint.model.head_size})
    [line] = checkpoint.differing_keys(other)
    assert line.startswith(
        f"model.head_dim={other.head_dim} is {checkpoint.model.head_size} in the checkpoint"
    )


def test_only_the_vocabulary_is_padded_with_zeros(llama):
    plain, padded = DenseCheckpoint(llama), DenseCheckpoint(llama, vocab_multiple=100)
    for name in plain.names:
        before, after = (checkpoint.read(name)["fp32"] for checkpoint in (plain, padded))
        assert padded.shape(name) == after.shape
        if name in ("0.tokens.weight", "4.linear.weight"):
            assert after.shape == (400, 32)
            assert not after[384:].any()
            after = after[:384]
        assert torch.equal(before, after)


def test_a_smaller_vocabulary_mismatches_even_at_equal_padded_size(llama):
    source = WeightSource.find("init.from", llama)
    assert source.vocab_size_mismatch(384) == []
    assert source.vocab_size_mismatch(383) == ["its vocabulary has 384 ids and the model's 383"]


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_index(folder, files):
    names = {f"tensor {number}": file for number, file in enumerate(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


SECTION = {"num_layers": 2, "hidden_size": 32, "num_heads": 4}
FAULTS = {
    "no checkpoint": (
        lambda f: (f / "config.json").unlink(),
        "is no Hugging Face checkpoint: it has no config.json",
    ),
    "an adapter": (
        lambda f: (f / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
        "has an adapter besides its weights (adapter_config.json), which transformers adds to them; save the model",
    ),
    "config.json cut off": (lambda f: (f / "config.json").write_text('{"model_type": "ll'), "is no JSON"),
    "unknown family": (
        lambda f: edit_config(f, model_type="mamba"),
        f"model_type='mamba' is not supported; give one of {', '.join(FAMILIES)}, megakernel",
    ),
    "experts": (
        lambda f: edit_config(f, model_type="gpt_oss"),
        "model_type='gpt_oss' is not read: its MLPs are mixtures of experts, which the model here does not have",
    ),
    "a vision tower": (
        lambda f: edit_config(f, model_type="gemma3"),
        "it has a vision tower; save its language model alone as gemma3_text",
    ),
    "a norm that attention and MLP share": (
        lambda f: edit_config(f, model_type="cohere"),
        "model_type='cohere' is not read: attention and MLP of a layer share one layer norm, which has no bias",
    ),
    "norms without weights": (
        lambda f: edit_config(f, model_type="olmo"),
        "model_type='olmo' is not read: its layer norms have no weights, and those of the model here do; take OLMo 2",
    ),
    "a kind that is a list": (
        lambda f: edit_config(f, model_type=[]),
        "model_type=[] is not supported; give one of llama, ",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "is not whole: model.safetensors missing"),
    "pickled weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "pytorch_model.bin is pickled: save it again with `save_pretrained`",
    ),
    "a file cut off": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
        "cannot be read",
    ),
    "half a download": (
        lambda f: (f / "model.safetensors").rename(f / "abc.incomplete"),
        "is not whole: model.safetensors missing; its download was interrupted: run it again",
    ),
    "a shard missing": (
        lambda f: write_index(f, ["model-1.safetensors", "model-2.safetensors"]),
        "is not whole: model-1.safetensors, model-2.safetensors missing; download what is missing",
    ),
    "an index cut off": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {'),
        "model.safetensors.index.json is no JSON",
    ),
    "an index of nothing": (lambda f: write_index(f, []), "index.json names no files; download it again"),
    "an index without names": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": null}'),
        "index.json names no files; download it again",
    ),
    "an index of numbers": (lambda f: write_index(f, [3]), "index.json names no files; download it again"),
    "a configuration of nothing": (lambda f: (f / "config.json").write_text("[]"), "holds no keys"),
    "a size that is none": (
        lambda f: edit_config(f, hidden_size="wide"),
        "config.json is no configuration of a llama model",
    ),
    "a run's model without its section": (
        lambda f: edit_config(f, model_type="megakernel"),
        "has no `attention`; export the run again with `megakernel export`",
    ),
    "a run's model without the size of its vocabulary": (
        lambda f: edit_config(f, model_type="megakernel", model=SECTION, vocab_size=None),
        "has no `vocab_size`; export the run again with `megakernel export`",
    ),
    "a run's model with a key too many": (
        lambda f: edit_config(f, model_type="megakernel", model={**SECTION, "num_head": 4}),
        "config.json: model.num_head=4 is an unknown key; did you mean num_heads",
    ),
    "a tensor missing": (
        lambda f: edit_tensors(f, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight")),
        "misses 1 tensors of a llama model: model.layers.1.mlp.up_proj.weight",
    ),
    "a tensor too many": (
        lambda f: edit_tensors(f, lambda tensors: tensors.update(extra=torch.ones(2))),
        "has unknown 1 tensors of a llama model: extra",
    ),
    "an inner width that is not the tensors'": (
        lambda f: edit_config(f, intermediate_size=64),
        "has 6 misshapen tensors of a llama model: model.layers.0.mlp.gate_proj.weight (48, 32) where config.json asks "
        "for (64, 32), ",
    ),
    "a number of heads that is not the tensors'": (
        lambda f: edit_config(f, num_key_value_heads=4),
        "has 4 misshapen tensors of a llama model: model.layers.0.self_attn.k_proj.weight (16, 32) where config.json "
        "asks for (32, 32), ",
    ),
    "a tensor that is cut": (
        lambda f: edit_tensors(f, lambda tensors: tensors.update({"lm_head.weight": torch.ones(383, 32)})),
        "has 1 misshapen tensors of a llama model: lm_head.weight (383, 32) where config.json asks for (384, 32); "
        "download it again, or correct config.json",
    ),
    "an activation that is not ours": (
        lambda f: edit_config(f, hidden_act="relu"),
        "hidden_act='relu' has no counterpart here; only 'silu' or 'gelu_pytorch_tanh' is read",
    ),
    "frequencies that are not ours": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "proportional", "rope_theta": 1e4}),
        "rope_type='proportional' has no counterpart here; linear, dynamic, yarn, llama3, longrope are read",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_invalid_checkpoint_is_refused_in_one_line(fault, llama, refused):
    damage, text = FAULTS[fault]
    damage(llama)
    with pytest.raises(UserError) as caught:
        DenseCheckpoint(llama)
    message = str(caught.value)
    assert text in message
    assert str(llama) in message
    assert message in refused("import", llama)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen2, some layers slide", "num_attention_heads"),
        ("gemma2", "query_pre_attn_scalar"),
        ("phi3, partly rotated, longrope", "original_max_position_embeddings"),
    ],
)
def test_a_zero_that_would_be_a_divisor_is_refused(name, key, tmp_path):
    dense_models.save(name, tmp_path)
    edit_config(tmp_path, **{key: 0})
    with pytest.raises(UserError, match=f"config.json: {key}=0 is not above 0; correct it"):
        DenseCheckpoint(tmp_path)


def test_a_window_that_no_layer_uses_is_ignored(tmp_path):
    dense_models.save("qwen2, yarn", tmp_path)
    window = {"use_sliding_window": True, "sliding_window": 8}
    edit_config(tmp_path, **window, layer_types=["full_attention", "full_attention"])
    assert DenseCheckpoint(tmp_path).model.attention.is_plain_softmax
    edit_config(tmp_path, **window, layer_types=["full_attention", "sliding_attention"])
    model = DenseCheckpoint(tmp_path).model
    assert [model.layer_attention(layer).window for layer in range(2)] == [None, 8]


def test_a_window_as_long_as_the_sequences_is_kept(tmp_path):
    """Otherwise it would be missing if sequences grow later, and in the export."""
    dense_models.save("mistral, sliding", tmp_path)
    edit_config(tmp_path, sliding_window=dense_models.LENGTH)
    model = DenseCheckpoint(tmp_path).model
    assert model.attention.window == dense_models.LENGTH
    written = plain_config(model, dense_models.VOCABULARY, 8)
    assert (written["sliding_window"], written["max_position_embeddings"]) == (dense_models.LENGTH,) * 2


SCALINGS = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "default": {},
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_the_old_key_of_rotary_scaling_is_read(kind, tmp_path):
    dense_models.save("qwen2, yarn", tmp_path)
    path = tmp_path / "config.json"
    tree = {key: x for key, x in json.loads(path.read_text()).items() if key != "rope_parameters"}
    found = []
    for name in ("rope_type", "type"):
        scaling = {"rope_scaling": {name: kind, **SCALINGS[kind]}, "rope_theta": 500.0}
        path.write_text(json.dumps(tree | scaling))
        found.append(DenseCheckpoint(tmp_path).model)
    assert found[0] == found[1]
    assert found[0].rope_scaling.kind == {"default": "none"}.get(kind, kind)
    assert found[0].rope_scaling.factor == SCALINGS[kind].get("factor")

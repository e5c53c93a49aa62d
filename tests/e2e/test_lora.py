"""LoRA on any matrix of a layer: training on any layout, export to PEFT and import from it."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from data_pipeline.tokenizers import ByteTokenizer
from launch.cli import main
from megakernel.checkpoint.adapter import export_adapter, read_adapter
from megakernel.checkpoint.dense import DenseCheckpoint
from megakernel.checkpoint.dense.tokenizer import save_tokenizer
from megakernel.checkpoint.files import CheckpointTensors
from megakernel.checkpoint.trained_run import TrainedRun
from megakernel.config import Lora, Model, UserError, yaml_text
from tests.distributed.training_run import assert_identical, assert_losses_close, layout, scalars, train

TARGETS = ["query", "key", "value", "output", "gate", "up", "down"]
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama with random weights, grouped-query attention and a byte tokenizer."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, vocab_size=257, intermediate_size=48, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(ByteTokenizer(), folder)
    return folder


@pytest.fixture(scope="module")
def config(base, corpus):
    """The configuration of a run that trains LoRA updates of every matrix of the base model."""
    tree = {
        "run": {"name": "run", "root": str(base.parent), "seed": 7},
        "model": DenseCheckpoint(base).section,
        "data": {"train": str(corpus), "num_workers": 0},
        "init": {"from": str(base)},
        "training": {
            **{"steps": 4, "seq_len": 64, "global_batch_size": 8, "micro_batch_size": 2, "log_every": 1},
            **{"eval_samples": 8, "dtype": "float32"},
        },
        "optimizer": {"lr": 1e-2, "trained": "lora", "lora": {"rank": 4, "alpha": 6, "targets": TARGETS}},
        "schedule": {"warmup_steps": 1},
    }
    path = base.parent / "config.yaml"
    path.write_text(yaml_text.write(tree))
    return path


@pytest.fixture(scope="module")
def one_process(config):
    return train(config, 1, "run.name=one")


@pytest.fixture(scope="module")
def adapter(config, one_process):
    """The updates of that run, exported as a PEFT adapter."""
    folder = config.parent / "adapter"
    assert main(["export", str(config.parent / "one"), "--to", str(folder), "--adapter"]) == 0
    return folder


@pytest.fixture
def tokens():
    return torch.randint(257, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, tokens):
    return model.eval()(tokens).logits


LAYOUTS = [
    "tp2",
    "tp2 sequence parallel dp2 zero 1",
    "tp2 cp2",
    "pp2 full recompute",
    "dp2 zero 2 mlp chunks",
]


@pytest.mark.second
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_layout_trains_lora_with_the_losses_of_one_process(ranks, config, one_process):
    assert scalars(one_process, "train/loss")[-1] < scalars(one_process, "train/loss")[0]
    assert_losses_close(train(config, *layout(ranks), f"run.name={ranks.replace(' ', '_')}"), one_process)


def test_only_lora_weights_have_optimizer_moments(config, one_process):
    stored = CheckpointTensors(TrainedRun.find(config.parent / "one").checkpoint)
    trained = {name for name in stored.names if stored.read(name, ["exp_avg"])}
    assert trained == {name for name in stored.names if "_update." in name}
    assert len(trained) == 2 * 2 * len(TARGETS)


def test_the_adapter_in_peft_has_the_logits_of_the_merged_export(config, base, adapter, tokens, tmp_path):
    assert len({path.stat().st_mode for path in adapter.iterdir()}) == 1, "the same people may read all files"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    assert settings["target_modules"] == sorted(MODULES)
    assert main(["export", str(config.parent / "one"), "--to", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    dense = AutoModelForCausalLM.from_pretrained(base)
    before = logits(dense, tokens)
    peft_model = PeftModel.from_pretrained(dense, adapter)
    # Logits of magnitude 10 in float32, summed in another order.
    torch.testing.assert_close(logits(peft_model, tokens), logits(merged, tokens), atol=2e-5, rtol=1e-5)
    assert (logits(peft_model, tokens) - before).abs().max() > 0.1
    torch.testing.assert_close(
        logits(peft_model.merge_and_unload(), tokens), logits(merged, tokens), atol=2e-5, rtol=1e-5
    )


@pytest.mark.second
def test_a_run_starts_from_an_adapter(config, adapter, one_process):
    lines = train(config, 1, f"init.adapter={adapter}", "run.name=on", "training.steps=1")
    assert scalars(lines, "eval/loss")[0] == pytest.approx(scalars(one_process, "eval/loss")[-1], rel=1e-6)


@pytest.mark.second
def test_an_adapter_trained_by_peft_has_the_same_logits_when_imported(config, base, tokens, tmp_path):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, lora_alpha=6, target_modules=MODULES)
    )
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path / "peft")
    overrides = ["run.name=peft", "training.steps=1", "optimizer.lr=1e-30", "optimizer.weight_decay=0"]
    train(config, 1, f"init.adapter={tmp_path / 'peft'}", *overrides)
    assert main(["export", str(config.parent / "peft"), "--to", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged, tokens), logits(model, tokens), atol=2e-5, rtol=1e-5)


@pytest.mark.second
def test_lora_dropout_is_the_same_after_a_resume(config):
    dropout, constant = "optimizer.lora.dropout=0.5", "schedule.name=constant"
    whole = train(config, 1, dropout, constant, "run.name=dropped")
    train(config, 1, dropout, constant, "run.name=restarted", "training.steps=2")
    restarted = train(config, 1, dropout, constant, "run.name=restarted")
    for tag in ("train/loss", "train/grad_norm"):
        assert scalars(restarted, tag) == scalars(whole, tag)
    with pytest.raises(AssertionError):
        assert_identical(whole, train(config, 1, constant, "run.name=undropped"))


def _resize_one_matrix(folder):
    weights = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in weights if name.endswith("k_proj.lora_B.weight"))
    save_file(weights | {name: weights[name][:-1].contiguous()}, folder / "adapter_model.safetensors")


def _edit_settings(**keys):
    def edit(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return edit


@pytest.mark.parametrize(
    ("damage", "explanation"),
    [
        (
            _resize_one_matrix,
            r"k_proj\.lora_B\.weight is \(15, 4\) and the model's \(16, 4\); give an adapter of a model of",
        ),
        (_edit_settings(r=8), r"has r=8 and optimizer\.lora\.rank is 4; set them alike"),
        (_edit_settings(use_dora=True), r"use_dora=True has no counterpart here; only False is read"),
        (
            _edit_settings(init_lora_weights="pissa"),
            r"init_lora_weights='pissa' also changed the base model's w",
        ),
        (
            _edit_settings(alora_invocation_tokens=[1]),
            r"alora_invocation_tokens=\[1\] has no counterpart here",
        ),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), r"is not a PEFT adapter"),
        (
            lambda folder: (folder / "adapter_config.json").write_text("[]"),
            r"is not a PEFT adapter \(adapter_config\.json holds no keys\)",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_the_model_is_refused_in_one_line(
    damage, explanation, base, adapter, tmp_path
):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    damage(folder)
    with pytest.raises(UserError, match=explanation) as error:
        read_adapter(folder, DenseCheckpoint(base).model, Lora(rank=4, alpha=6, targets=TARGETS))
    assert "\n" not in str(error.value)


def test_an_adapter_of_other_target_modules_is_refused(base, adapter):
    with pytest.raises(
        UserError, match=r"only the adapter has .*; set optimizer\.lora\.targets to what its target_mod"
    ):
        read_adapter(adapter, DenseCheckpoint(base).model, Lora(rank=4, alpha=6))


@pytest.mark.parametrize(
    ("parts", "explanation"),
    [
        ({"attention": "flurka"}, "no architecture of transformers has this model's parts"),
        (
            {
                "norm": "layernorm",
                "position": "learned",
                "activation": "gelu_tanh",
                "bias": True,
                "qkv_bias": True,
            },
            r"gpt2 has value in one matrix with others \(attn.c_attn\)",
        ),
    ],
)
def test_an_adapter_for_a_model_that_peft_cannot_describe_is_refused(parts, explanation, adapter):
    model = Model(**{"num_layers": 2, "hidden_size": 32, "num_heads": 4, "attention": "softmax"} | parts)
    with pytest.raises(UserError, match=explanation):
        read_adapter(adapter, model, Lora(rank=4, alpha=6))


@pytest.mark.second
def test_exporting_an_adapter_of_a_run_without_lora_is_refused(config, tmp_path):
    train(config, 1, "optimizer.trained=all", "optimizer.lora=null", "run.name=all", "training.steps=1")
    with pytest.raises(UserError, match=r"has no low-rank updates; leave out --adapter, or give a run of"):
        export_adapter(config.parent / "all", tmp_path / "adapter")

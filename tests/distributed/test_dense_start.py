"""A run that starts from a dense checkpoint has the loss that `transformers` computes, on any layout."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from data_pipeline.corpus import Corpora
from data_pipeline.loader import ValidationBatches
from data_pipeline.order import Share
from launch.cli import main
from megakernel.checkpoint.files import CheckpointTensors
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import load
from tests import dense_models
from tests.dense_models import tokens
from tests.distributed.processes import RankFailedError, cpu_mesh, run_ranks
from tests.distributed.training_run import layout, train, write_config
from tests.tiers import tiered

LAYOUTS = ["one process", "tp2", "pp2", "tp2 sequence parallel zero 3", "one process bfloat16"]

START_MODELS = (
    *("llama", "gpt2", "llama, biases, tied, scaled", "qwen3, tied", "gpt_neox"),
    *("smollm3", "granite", "olmo2", "phi3, sliding", "gemma2", "gemma3"),
)
"""Models that runs start from; logits are compared for all models."""


def logits(names, folder, dtype):
    """Logits of each model in Megakernel, for the same tokens."""
    from megakernel.checkpoint.dense import DenseCheckpoint
    from megakernel.model import LanguageModel, ModelSettings

    results = {}
    with cpu_mesh() as mesh, torch.no_grad():
        for name in names:
            checkpoint = DenseCheckpoint(Path(folder, name), vocab_multiple=128)
            assert checkpoint.model.vocab_size is not None
            model_config = checkpoint.model.for_seq_len(dense_models.LENGTH)
            model = LanguageModel(ModelSettings(model_config, checkpoint.model.vocab_size, mesh)).eval()
            for key, target in model.state_dict().items():
                if isinstance(target, torch.Tensor):
                    target.copy_(checkpoint.read(key)["fp32"])
            hidden = model.to(dtype).hidden(tokens(), torch.arange(dense_models.LENGTH)[None])
            results[name] = model.logits(hidden)
    return results


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        pytest.param(torch.float32, 1e-4, id="float32"),
        pytest.param(torch.bfloat16, 2e-2, marks=pytest.mark.second, id="bfloat16"),
    ],
)
def test_logits_match_transformers(dtype, bound, tmp_path):
    models = {name: dense_models.save(name, tmp_path / name) for name in dense_models.CONFIGS}
    for name, actual in run_ranks(logits, 1, list(models), str(tmp_path), dtype)[0].items():
        with torch.no_grad():
            reference = models[name].float()(tokens()).logits
        error = (actual.float() - reference).square().mean().sqrt() / reference.square().mean().sqrt()
        assert error < bound, name


@pytest.fixture(scope="module")
def starts(tmp_path_factory, corpus):
    """Name -> a configuration that starts from the checkpoint, and the loss of `transformers` on its validation set."""
    configs = {}
    for number, name in enumerate(START_MODELS):
        folder = tmp_path_factory.mktemp(f"dense-{number}")
        model = dense_models.save(name, folder / "hf")
        configs[name] = (
            (config := write_config_for(folder, corpus, folder / "hf")),
            transformers_loss(model, config),
        )
    return configs


def write_config_for(folder, corpus, source):
    from megakernel.checkpoint.dense import DenseCheckpoint
    from megakernel.config import yaml_text

    tree = {
        "run": {"name": "run", "root": str(folder)},
        "model": DenseCheckpoint(source).section,
        "init": {"from": str(source)},
        # `transformers` takes a sequence as one document.
        "data": {"train": str(corpus), "isolate_documents": False, "num_workers": 0},
        "training": {
            "steps": 1,
            "seq_len": dense_models.LENGTH,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "eval_samples": 8,
            "dtype": "float32",
        },
    }
    path = folder / "config.yaml"
    path.write_text(yaml_text.write(tree))
    return path


@torch.no_grad()
def transformers_loss(model, config, overrides=()):
    loaded = load(config, overrides)
    corpora = Corpora(loaded.data)
    total = count = 0.0
    for batch in ValidationBatches(loaded, corpora, Share()):
        losses = F.cross_entropy(
            model(batch.tokens).logits.flatten(0, 1), batch.labels.flatten(), reduction="none"
        )
        total += float((losses * batch.loss_mask.flatten()).sum())
        count += float(batch.loss_mask.sum())
    return total / count


CASES = [
    (ranks, name)
    for ranks in LAYOUTS
    # The logits of all families over such ranks: tests/distributed/test_dense_layouts.py. The export below runs on tp2.
    for name in (
        *(["llama", "gpt2"] if ranks != "tp2" else []),
        *(["llama, biases, tied, scaled"] if ranks in ("tp2", "pp2") else []),
    )
]


@pytest.mark.second
@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_the_first_evaluation_has_the_loss_that_transformers_computes(ranks, name, starts, tmp_path):
    config, expected = starts[name]
    lines = train(config, *layout(ranks), f"run.root={tmp_path}")
    bound = 2e-2 if "bfloat16" in ranks else 1e-5
    assert lines[0]["eval/loss"] == pytest.approx(expected, rel=bound)


@pytest.mark.second
def test_a_student_whose_window_holds_the_whole_sequence_equals_the_dense_model(starts, tmp_path):
    config, expected = starts["llama"]
    tree = {"preset": "flurka", "compression": {"block_size": dense_models.LENGTH, "rank": 4}}
    lines = train(config, 1, f"model.attention={json.dumps(tree)}", f"run.root={tmp_path}")
    assert lines[0]["eval/loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.second
def test_preflight_accepts_a_correct_model_in_bfloat16(corpus, tmp_path):
    """In bfloat16 `transformers` differs from itself by up to a tenth of the largest logit."""
    configs = {}
    names = (
        "llama",
        "qwen2, yarn",
        "qwen3, tied",
        "gpt2",
        "gpt_neox",
        "smollm3",
        "granite",
        "olmo2",
        "gemma2",
    )
    for number, name in enumerate(names):
        dense_models.save(name, tmp_path / str(number) / "hf")
        configs[name] = write_config_for(tmp_path / str(number), corpus, tmp_path / str(number) / "hf")
    for name, result in run_ranks(run_preflights, 1, configs)[0].items():
        assert result.parity.difference < 1e-5, name
        if name == "gemma2":  # a window does not cap attention logits
            assert result.identity is None
        else:
            assert abs(result.identity.student - result.identity.dense) < 1e-2, name


def run_preflights(configs):
    from megakernel.uptraining.identity import preflight
    from megakernel.uptraining.validation import Validation

    results = {}
    with cpu_mesh() as mesh:
        for name, file in configs.items():
            window = json.dumps({"preset": "flurka", "compression": {"block_size": 16, "rank": 4}})
            run = load(file, ["training.dtype=bfloat16", f"model.attention={window}"])
            source = WeightSource.find("init.from", run.init.source)
            results[name] = preflight(Validation(run, mesh), source, run.model)
            print(name, results[name].parity, results[name].identity, flush=True)
    return results


def test_a_model_of_other_sizes_is_refused_with_a_list_of_all_differences(starts, tmp_path):
    config, _ = starts["llama"]
    overrides = [
        "model.ffn_hidden_size=64",
        "model.norm_eps=0.1",
        "model.vocab_size=383",
        f"run.root={tmp_path}",
    ]
    with pytest.raises(RankFailedError) as caught:
        train(config, 2, *overrides)
    message = str(caught.value)
    assert (
        f"init.from={config.parent / 'hf'}: model.norm_eps=0.1 is 1e-06 in the checkpoint; set it to that"
        in message
    )
    assert "its vocabulary has 384 ids and the model's 383; give the model the checkpoint's sizes" in message
    assert "1.mlp.linear_fc1.weight is (96, 32) in the checkpoint and (128, 32) in the model" in message
    assert "2.mlp.linear_fc2.weight is (32, 48) in the checkpoint and (32, 64) in the model" in message


@pytest.mark.second
def test_frozen_weights_of_a_half_precision_run_are_carried_on_unchanged(starts, tmp_path):
    config, _ = starts["llama"]
    kernel = '{"similarity": "kernel", "feature_map": {"name": "hedgehog"}}'
    frozen = ("training.dtype=bfloat16", "optimizer.trained=mechanism", "training.eval_samples=0")
    train(config, 1, *frozen, f"model.attention={kernel}", f"run.root={tmp_path}")
    dense, run = (WeightSource.find("init.from", x) for x in (config.parent / "hf", tmp_path / "run"))
    model = run.model()
    before, after = dense.tensors(model), run.tensors(model)
    saved = CheckpointTensors(run.checkpoint).read("1.mlp.linear_fc1.weight", ["fp32"])["fp32"]
    assert saved.dtype == torch.bfloat16
    for name in before.names:
        assert torch.equal(after.read(name, ["fp32"])["fp32"], before.read(name, ["fp32"])["fp32"]), name


@pytest.mark.parametrize(
    "name",
    tiered(
        [name for name in START_MODELS if name != "llama, biases, tied, scaled"],
        ["gemma2"],
    ),
)
def test_an_imported_checkpoint_has_the_same_loss_and_is_exported_bit_for_bit(name, starts, tmp_path, capsys):
    config, expected = starts[name]
    # An update too small to change any weight.
    still = ("optimizer.lr=1e-30", "optimizer.weight_decay=0")
    lines = train(config, 2, *still, "parallel.tensor=2", f"run.root={tmp_path}")
    assert lines[0]["eval/loss"] == pytest.approx(expected, rel=1e-5)
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    before, after = (
        load_file(folder / "model.safetensors") for folder in (config.parent / "hf", tmp_path / "out")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 2
    assert f"--to {tmp_path / 'out'} is in use; name a new folder" in capsys.readouterr().err


def test_an_exported_model_has_the_same_loss_in_transformers(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    softmax = ("model.attention=softmax", "model.attention_pattern=null", "data.isolate_documents=false")
    lines = train(config, 2, *softmax, "training.steps=2")
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    loaded = load(config, softmax)
    assert transformers_loss(model, config, softmax) == pytest.approx(lines[-1]["eval/loss"], rel=1e-5)
    assert model.config.vocab_size == 257
    assert loaded.training.seq_len == model.config.max_position_embeddings

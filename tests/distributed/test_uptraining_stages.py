"""Up-training over pipeline stages equals that of one process, including all numbers of its report."""

import copy
import json
import math
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from launch.training import providers
from megakernel.checkpoint.dense import DenseCheckpoint
from megakernel.checkpoint.files import CheckpointTensors
from megakernel.checkpoint.parity import parity
from megakernel.checkpoint.trained_run import find_checkpoint
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import UserError, load, yaml_text
from megakernel.training.process import run_in_mesh
from megakernel.training.trainer import Trainer
from megakernel.uptraining.run import Uptraining
from megakernel.uptraining.validation import Validation
from tests import dense_models
from tests.distributed.processes import run_ranks, this_process
from tests.distributed.training_run import metrics, scalars

pytestmark = pytest.mark.second

LAYERS, HEADS = 3, 4
"""Three pipeline stages, as only a middle stage both receives and sends."""

UPTRAINING = {
    "run": {"name": "up", "seed": 7},
    "parallel": {"zero_stage": 1},
    "training": {
        "steps": 4,
        "seq_len": dense_models.LENGTH,
        "global_batch_size": 2,
        "micro_batch_size": 1,
        "dtype": "float32",
        "log_every": 1,
        "eval_samples": 2,
    },
    "optimizer": {"lr": 1e-3, "mechanism_lr": 1e-2},
    "checkpoint": {"every": 1},
    "uptrain": {
        "alpha": 0.25,
        "transfer": {"steps": 2, "lr": 0.02, "rows": 4, "cross_entropy": 0.1},
        "distill": {"temperature": 2.0},
        "train_dense": True,
    },
}
STAGES = ["1-transfer", "2-base", "3-rank8", "4-main", "5-dense"]

PATTERN = 'model.attention_pattern=["main","softmax","main"]'
REFUSED = {
    (
        "uptrain=null",
        PATTERN,
        "run.name=lacks_groups",
    ): "stage 0: matrices, norms and biases, weights of mechanisms; stage 1: matrices, norms and biases; ",
    (
        "uptrain=null",
        PATTERN,
        "run.name=lacks_weights",
        "optimizer.mechanism_lr=null",
        "optimizer.trained=mechanism",
    ): "a stage of parallel.pipeline has model.attention with no weights of its own",
}
"""Overrides -> why they are refused if each layer is a pipeline stage."""


@pytest.fixture(scope="module")
def config(tmp_path_factory, corpus):
    """An up-training of a dense model of `transformers` with random weights."""
    folder = tmp_path_factory.mktemp("stages")
    # Tied embeddings: the first and the last stage have a copy each, which the transfer does not train.
    changes = {"num_hidden_layers": LAYERS, "tie_word_embeddings": True}
    sizes = copy.deepcopy(dense_models.CONFIGS["llama"]).to_dict() | changes
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig.from_dict(sizes)).save_pretrained(folder / "dense")
    section = DenseCheckpoint(folder / "dense").section
    tree = UPTRAINING | {
        "run": UPTRAINING["run"] | {"root": str(folder)},
        "init": {"from": str(folder / "dense")},
        "model": section | {"attention": {"preset": "flurka", "compression": {"block_size": 16, "rank": 4}}},
        "data": {"train": str(corpus), "num_workers": 0},
    }
    # Megakernel can read this checkpoint, but transformers fails on its pad_token_id.
    broken = shutil.copytree(folder / "dense", folder / "broken") / "config.json"
    broken.write_text(json.dumps(json.loads(broken.read_text()) | {"pad_token_id": 10**6}))
    path = folder / "up.yaml"
    path.write_text(yaml_text.write(tree))
    return path


@pytest.fixture(scope="module")
def whole(config):
    """The folder of an up-training by one process."""
    run_ranks(run_uptraining, 1, config, ("run.name=whole",), (), timeout=280.0)
    return config.parent / "whole"


@pytest.fixture(scope="module")
def staged(config):
    """The folder of an up-training with one layer per pipeline stage, and what each rank returned."""
    overrides = ("run.name=staged", f"parallel.pipeline={LAYERS}")
    results = run_ranks(run_uptraining, LAYERS, config, overrides, tuple(REFUSED), timeout=280.0)
    return config.parent / "staged", results


def run_uptraining(config, overrides, refused):
    run = load(config, overrides)

    def work(mesh):
        assert Uptraining(run, mesh, providers()).run() == 0
        messages = [refusal(load(config, (*overrides, *more)), mesh) for more in refused]
        return messages, parities(run, mesh)

    return run_in_mesh(run, this_process(), work)


def parities(run, mesh):
    """The parity of a model whose logits are NaN, and the error if transformers cannot load the folder."""
    source = WeightSource.find("init.from", run.init.source)
    model = Validation(run, mesh).model(source.model(), source)
    if mesh.is_last_stage:
        model.output_matrix.fill_(math.nan)
    broken = WeightSource.find("init.from", run.init.source.with_name("broken"))
    with pytest.raises(UserError) as refused:
        parity(lambda: model, broken, mesh)
    return parity(lambda: model, source, mesh).difference, str(refused.value)


def refusal(config, mesh):
    with pytest.raises(UserError) as refused:
        Trainer(config, mesh, providers())
    return str(refused.value)


@pytest.mark.parametrize("stage", STAGES)
def test_pipeline_stages_have_the_metrics_of_one_process(stage, whole, staged):
    expected, lines = metrics(whole / stage), metrics(staged[0] / stage)
    prefixes = ("train/loss", "train/grad_norm", "eval/loss", "transfer/")
    for actual, line in zip(lines, expected, strict=True):
        tags = [tag for tag in line if tag.startswith(prefixes)]
        assert [tag for tag in actual if tag.startswith(prefixes)] == tags
        for tag in tags:
            assert actual[tag] == pytest.approx(line[tag], rel=1e-4, abs=1e-5), tag
    heads = [tag for tag in lines[-1] if tag.startswith("transfer/error/")]
    assert len(heads) == (LAYERS * HEADS if stage == "1-transfer" else 0)


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoints_of_pipeline_stages_hold_the_weights_of_one_process(stage, whole, staged):
    expected, stored = (CheckpointTensors(find_checkpoint(run / stage)) for run in (whole, staged[0]))
    assert stored.names == expected.names
    for name in expected.names:
        actual, wanted = (tensors.read(name, ["fp32"])["fp32"].float() for tensors in (stored, expected))
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5, msg=name)


def test_a_stopped_uptraining_continues_on_another_layout(config, whole, staged):
    """The first step ran on three pipeline stages, the second runs on two ranks with ZeRO stage 3."""
    moved = config.parent / "moved"
    shutil.copytree(staged[0], moved)
    for lost in ("1-transfer/checkpoints/step_2", "2-base", "4-main/checkpoints/step_2"):
        shutil.rmtree(moved / lost)
    run_ranks(run_uptraining, 2, config, ("run.name=moved", "parallel.zero_stage=3"), (), timeout=280.0)
    for stage in ("1-transfer", "2-base", "4-main"):
        expected, lines = metrics(whole / stage), metrics(moved / stage)
        for tag in ("train/loss", "train/grad_norm", "eval/loss"):
            assert scalars(lines, tag) == pytest.approx(scalars(expected, tag), rel=1e-4, abs=1e-5), (
                stage,
                tag,
            )


def test_the_report_of_pipeline_stages_is_that_of_one_process(whole, staged):
    expected, actual = (json.loads((run / "uptrain_report.json").read_text()) for run in (whole, staged[0]))
    assert expected["parity"] < 1e-4  # of logits, which only the last stage has
    assert actual["parity"] < 1e-4
    rows, actual_rows = (
        [report["dense"], report["swapped"], *report["stages"], *report["ablations"]]
        for report in (expected, actual)
    )
    assert [row["name"] for row in actual_rows] == [row["name"] for row in rows]
    # dense, swapped, four stages; ablations: dense trained on, its window, no far part, no near window, sliding window
    assert len(rows) == 6 + 5
    for left, right in zip(actual_rows, rows, strict=True):
        assert (left["loss"], left["beyond"]) == pytest.approx((right["loss"], right["beyond"]), abs=1e-5)
    assert actual["heads"] == pytest.approx(expected["heads"], rel=1e-4, abs=1e-5)
    assert actual["identity"] == pytest.approx(expected["identity"], abs=1e-5)


def test_the_parity_result_of_the_last_stage_reaches_all_ranks(staged):
    for _, (difference, text) in staged[1]:
        assert math.isnan(difference)
        assert text == staged[1][0][1][1]
        assert "broken: transformers cannot compute its logits" in text


def test_pipeline_stages_without_own_weights_are_refused_on_all_ranks(staged):
    for texts, _ in staged[1]:
        assert texts == staged[1][0][0]
        for text, reason in zip(texts, REFUSED.values(), strict=True):
            assert reason in text

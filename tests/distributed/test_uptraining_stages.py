"""Up-training over pipeline stages is that of one process, to the last number of its report."""

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

LAYERS, HEADS = 3, 4
"""A stage between the first and the last: of DeepSpeed's it alone both receives and hands on."""

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
    ): "attention layers own weights on some stages and none on",
    (
        "uptrain=null",
        PATTERN,
        "run.name=lacks_weights",
        "optimizer.mechanism_lr=null",
        "optimizer.trained=mechanism",
    ): "a stage of parallel.pipeline has model.attention with no weights of its own",
}
"""Overrides -> why they are refused where each layer is a stage."""


@pytest.fixture(scope="module")
def config(tmp_path_factory, corpus):
    """An up-training of a dense model of `transformers` with random weights."""
    folder = tmp_path_factory.mktemp("stages")
    # Tied: the first and the last stage have a copy each, which the transfer does not train.
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
    # Its weights are read like any other's; transformers alone asks for a sequence of padding.
    broken = shutil.copytree(folder / "dense", folder / "broken") / "config.json"
    broken.write_text(json.dumps(json.loads(broken.read_text()) | {"pad_token_id": 10**6}))
    path = folder / "up.yaml"
    path.write_text(yaml_text.write(tree))
    return path


@pytest.fixture(scope="module")
def whole(config):
    """The folder of an up-training by one process."""
    run_ranks(up_trained, 1, config, ("run.name=whole",), (), timeout=280.0)
    return config.parent / "whole"


@pytest.fixture(scope="module")
def staged(config):
    """The folder of one by a stage for each layer, and what each rank was told of REFUSED."""
    overrides = ("run.name=staged", f"parallel.pipeline={LAYERS}")
    told = run_ranks(up_trained, LAYERS, config, overrides, tuple(REFUSED), timeout=280.0)
    return config.parent / "staged", told


def up_trained(config, overrides, refused):
    run = load(config, overrides)

    def work(mesh):
        assert Uptraining(run, mesh, providers()).run() == 0
        told = [refusal(load(config, (*overrides, *more)), mesh) for more in refused]
        return told, parities(run, mesh)

    return run_in_mesh(run, this_process(), work)


def parities(run, mesh):
    """Of a model that predicts no number, and what is said where transformers cannot load the folder."""
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
def test_stages_learn_what_one_process_learns(stage, whole, staged):
    expected, found = metrics(whole / stage), metrics(staged[0] / stage)
    wanted = ("train/loss", "train/grad_norm", "eval/loss", "transfer/")
    for ours, line in zip(found, expected, strict=True):
        tags = [tag for tag in line if tag.startswith(wanted)]
        assert [tag for tag in ours if tag.startswith(wanted)] == tags
        for tag in tags:
            assert ours[tag] == pytest.approx(line[tag], rel=1e-4, abs=1e-5), tag
    heads = [tag for tag in found[-1] if tag.startswith("transfer/error/")]
    assert len(heads) == (LAYERS * HEADS if stage == "1-transfer" else 0)


@pytest.mark.parametrize("stage", STAGES)
def test_their_checkpoints_hold_the_weights_of_one_process(stage, whole, staged):
    expected, found = (CheckpointTensors(find_checkpoint(run / stage)) for run in (whole, staged[0]))
    assert found.names == expected.names
    for name in expected.names:
        ours, theirs = (tensors.read(name, ["fp32"])["fp32"].float() for tensors in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, msg=name)


def test_stages_that_were_stopped_go_on_in_another_layout(config, whole, staged):
    """The first of their steps was done by a stage for each layer, the second is by two processes that cut weights."""
    moved = config.parent / "moved"
    shutil.copytree(staged[0], moved)
    for lost in ("1-transfer/checkpoints/step_2", "2-base", "4-main/checkpoints/step_2"):
        shutil.rmtree(moved / lost)
    run_ranks(up_trained, 2, config, ("run.name=moved", "parallel.zero_stage=3"), (), timeout=280.0)
    for stage in ("1-transfer", "2-base", "4-main"):
        expected, found = metrics(whole / stage), metrics(moved / stage)
        for tag in ("train/loss", "train/grad_norm", "eval/loss"):
            assert scalars(found, tag) == pytest.approx(scalars(expected, tag), rel=1e-4, abs=1e-5), (
                stage,
                tag,
            )


def test_their_report_is_that_of_one_process(whole, staged):
    expected, found = (json.loads((run / "uptrain_report.json").read_text()) for run in (whole, staged[0]))
    assert expected["parity"] < 1e-4  # of logits that the last stage alone has
    assert found["parity"] < 1e-4
    rows, ours = (
        [report["dense"], report["swapped"], *report["stages"], *report["ablations"]]
        for report in (expected, found)
    )
    assert [row["name"] for row in ours] == [row["name"] for row in rows]
    # dense, swapped, four stages; dense trained on and its window, far part off, near window off, sliding window
    assert len(rows) == 6 + 5
    for left, right in zip(ours, rows, strict=True):
        assert (left["loss"], left["beyond"]) == pytest.approx((right["loss"], right["beyond"]), abs=1e-5)
    assert found["heads"] == pytest.approx(expected["heads"], rel=1e-4, abs=1e-5)
    assert found["identity"] == pytest.approx(expected["identity"], abs=1e-5)


def test_what_one_rank_finds_of_the_logits_is_told_to_all(staged):
    for _, (difference, text) in staged[1]:
        assert math.isnan(difference)
        assert text == staged[1][0][1][1]
        assert "broken: transformers cannot compute its logits" in text


def test_stages_without_weights_of_their_own_are_refused_alike_on_all_ranks(staged):
    for texts, _ in staged[1]:
        assert texts == staged[1][0][0]
        for text, reason in zip(texts, REFUSED.values(), strict=True):
            assert reason in text

"""Up-training of encoders: FLuRKA's sections 4.2 and 4.3, low-rank or kernel first, then the product."""

import json

import pytest

from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import Attention, expand_preset, load
from tests.distributed.processes import RankFailedError, run_ranks
from tests.distributed.training_run import metrics, pretrain_in_this_rank, scalars, train

pytestmark = pytest.mark.second

DENSE = """
run: {{root: {folder}, name: dense, seed: 7}}
model: {{kind: masked_lm, num_layers: 2, hidden_size: 32, num_heads: 2, qkv_bias: true, attention: softmax}}
data: {{train: {corpus}, num_workers: 0, isolate_documents: false}}
parallel: {{zero_stage: 0}}
training:
  steps: 8
  seq_len: 32
  global_batch_size: 8
  micro_batch_size: 4
  dtype: float32
  log_every: 1
  eval_samples: 8
optimizer: {{lr: 3e-3}}
schedule: {{warmup_steps: 2}}
"""

STUDENT = """
extends: dense.yaml
run: {{name: up}}
init: {{from: {folder}/dense}}
model: {{attention: {{preset: flurka_performer, compression: {{rank: 8}}}}, max_positions: 32}}
optimizer: {{lr: 1e-3}}
uptrain: {{alpha: 0.5}}
"""

VARIANTS = {
    ("flurka_performer", "low_rank"): "linformer",
    ("flurka_performer", "kernel"): "performer",
    ("flurka_rnn", "low_rank"): "linformer",
    ("flurka_rnn", "kernel"): "linear",
    ("flurka_eva", "low_rank"): "linformer",
    ("flurka_eva", "kernel"): "eva",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory, corpus):
    """A folder with a dense masked language model, and a configuration that starts from it."""
    folder = tmp_path_factory.mktemp("uptraining")
    (folder / "dense.yaml").write_text(DENSE.format(folder=folder, corpus=corpus))
    (folder / "student.yaml").write_text(STUDENT.format(folder=folder))
    train(folder / "dense.yaml", 1)
    return folder


def kept_tensors(base, model):
    """Names of the mechanisms' weights that `model` takes over from the run of a base stage."""
    names = WeightSource.find("init.from", base).tensors(model).names
    return {name.partition(".core.")[2] for name in names if ".core." in name}


@pytest.mark.parametrize(("preset", "base"), VARIANTS)
def test_an_encoder_trains_one_half_of_flurka_and_then_the_product(preset, base, root):
    compression = {"kind": "linformer", "rank": 8}
    overrides = [f"run.name={preset}-{base}", f"uptrain.base={base}"]
    overrides.append(f"model.attention={json.dumps({'preset': preset, 'compression': compression})}")
    statuses = run_ranks(pretrain_in_this_rank, 1, root / "student.yaml", overrides, timeout=280.0)
    assert set(statuses) == {0}
    folder = root / f"{preset}-{base}"
    first, second = (load(folder / name / "config.yaml") for name in ("1-base", "2-main"))
    half = {"preset": VARIANTS[preset, base]}
    if base == "low_rank":
        half["compression"] = compression
    # The weights of the half are those that the product begins with, and the other half's are new.
    assert first.model.attention == Attention.model_validate(expand_preset(half))
    kept = {"linformer": {"compressor"}, "performer": {"projection"}, "linear": set(), "eva": {"summaries"}}
    parts = {name.partition(".")[0] for name in kept_tensors(folder / "1-base", second.model)}
    assert parts == kept[half["preset"]]
    assert (first.training.steps, second.training.steps) == (4, 4)
    assert first.objective.kind == second.objective.kind == "distill"
    for stage in ("1-base", "2-main"):
        assert len(scalars(metrics(folder / stage), "train/divergence")) == 4
    report = json.loads((folder / "uptrain_report.json").read_text())
    assert report["identity"]["student"] == pytest.approx(report["identity"]["dense"], abs=1e-5)
    assert report["decoding"] == {}


def test_a_teacher_of_another_kind_is_refused(root, config):
    train(config, 1, "run.name=decoder", f"run.root={root}", "training.steps=1", "model.attention=softmax")
    teacher = {"kind": "distill", "teacher": str(root / "decoder")}
    with pytest.raises(RankFailedError, match=r"is a causal_lm and model\.kind=masked_lm"):
        train(root / "dense.yaml", 1, "run.name=taught", f"objective={json.dumps(teacher)}")

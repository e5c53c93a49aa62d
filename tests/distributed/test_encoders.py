"""Encoders have the losses of one process on any layout, and continue where they were stopped."""

import json
import random
from functools import cache

import pytest
import torch

from launch.cli import main
from megakernel.checkpoint.files import CheckpointTensors
from megakernel.checkpoint.trained_run import find_checkpoint
from megakernel.checkpoint.whole_tensors import WEIGHT
from megakernel.config import UserError
from megakernel.evaluation import evaluate_run
from tests.distributed.processes import run_ranks
from tests.distributed.training_run import (
    assert_losses_close,
    assert_resumed_bit_identically,
    layout,
    scalars,
    train,
)
from tests.tiers import tiered

CONFIG = """
run: {{name: run, seed: 7, root: {root}}}
model: {{num_layers: 4, hidden_size: 32, num_heads: 4, {model}}}
training: {{steps: 3, seq_len: 64, global_batch_size: 8, micro_batch_size: 2,
  dtype: float32, log_every: 1, eval_samples: 6}}
optimizer: {{lr: 1e-3}}
schedule: {{warmup_steps: 1}}
data: {{num_workers: 0, train: {corpus}, isolate_documents: {documents}}}
logging: {{tensorboard: false}}
"""

MODELS = {
    "masked_lm": "kind: masked_lm, attention_pattern: [softmax, hedgehog], position: sinusoidal",
    "masked_lm on landmarks": (
        "kind: masked_lm, tie_embeddings: false, attention_pattern: ["
        "{preset: eva, eva: {window_size: 16, chunk_size: 8}}, skyformer, "
        "{preset: nystromformer, nystromformer: {conv_kernel: 3}}, "
        "{preset: flurka_eva, eva: {window_size: 16}, compression: {rank: 8}}]"
    ),
    "masked_lm on few weights": (
        "kind: masked_lm, attention_pattern: [{preset: bigbird, bigbird: {block_size: 4}}, informer, "
        "{preset: reformer, reformer: {chunk_size: 8}}, {preset: informer, informer: {top: 8}}]"
    ),
    "masked_lm on shared landmarks": (
        "kind: masked_lm, attention_pattern: ["
        "{preset: linformer, compression: {rank: 8, share_layers: true}}, "
        "{preset: flurka_rnn, compression: {rank: 8, share_layers: true}}]"
    ),
    "classifier": (
        "kind: classifier, classifier: {num_classes: 2, pooling: cls, head: mlp}, "
        "attention_pattern: [softmax, performer], position: learned"
    ),
    "classifier on compressed inputs": (
        "kind: classifier, classifier: {num_classes: 2}, attention_pattern: ["
        "{preset: linformer, compression: {rank: 8}}, {preset: flurka_rnn, compression: {rank: 8}}]"
    ),
    "classifier of pairs": (
        "kind: classifier, classifier: {num_classes: 3, documents: 2}, attention_pattern: [linear, softmax]"
    ),
}
"""Every head and pooling, every kind of position, and mechanisms of linear and quadratic cost."""

LAYOUTS = [
    *("dp2", "dp2 zero 1", "dp2 zero 2", "dp2 zero 3"),
    *("tp2", "tp2 sequence parallel", "cp2", "cp2 ring", "pp2"),
]

PADDED_LAYOUTS = [name for name in LAYOUTS if not name.startswith("cp2")]
CASES = [
    *(("masked_lm", name) for name in LAYOUTS),
    ("masked_lm on landmarks", "cp2"),
    ("masked_lm on few weights", "cp2"),
    ("masked_lm on few weights", "tp2"),
    *(("masked_lm on shared landmarks", name) for name in ("dp2 zero 1", "dp2 zero 2", "tp2", "cp2")),
    *(("classifier", name) for name in PADDED_LAYOUTS),
    ("classifier on compressed inputs", "tp2"),
    ("classifier on compressed inputs", "tp2 sequence parallel"),
    ("classifier of pairs", "dp2"),
    ("classifier of pairs", "tp2 sequence parallel"),
    ("classifier of pairs", "pp2"),
]
FIRST_TIER = [("masked_lm on landmarks", "cp2"), ("classifier of pairs", "tp2 sequence parallel")]
"""The first tier: a language model and a classifier."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory, corpus):
    """Prepared folders by kind of model: text, and labeled sequences of one and of two texts."""
    folder = tmp_path_factory.mktemp("labelled")
    draw = random.Random(0)
    with (folder / "rows.jsonl").open("w") as rows:
        for place in range(60):
            first, second = ("".join(draw.choices("abcd ", k=draw.randint(1, 90))) for _ in range(2))
            row = {"text": first, "other": second, "sign": "-+"[place % 2], "third": place % 3}
            rows.write(json.dumps(row) + "\n")
    prepare = f"prepare --source {folder}/rows.jsonl --tokenizer byte --validation-fraction 0.2 --workers 1"
    assert main(f"{prepare} --labels sign --out {folder}/one".split()) == 0
    assert main(f"{prepare} --labels third --second-text-key other --out {folder}/two".split()) == 0
    return {"masked_lm": corpus, "classifier": folder / "one", "classifier of pairs": folder / "two"}


def write_config(folder, corpora, name):
    path = folder / "config.yaml"
    corpus = corpora[name.partition(" on ")[0]]
    # Landmarks and choices of a whole sequence mix its documents.
    documents = str(not name.startswith("masked_lm on ")).lower()
    path.write_text(CONFIG.format(root=folder, model=MODELS[name], corpus=corpus, documents=documents))
    return path


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, corpora):
    """Model -> its configuration and metrics in one process, trained when first asked for."""

    @cache
    def measured(name):
        config = write_config(tmp_path_factory.mktemp("one"), corpora, name)
        return config, train(config, 1)

    return measured


@pytest.mark.parametrize(("model", "ranks"), tiered(CASES, FIRST_TIER))
def test_every_layout_has_the_losses_of_one_process(model, ranks, one_process, tmp_path):
    config, expected = one_process(model)
    lines = train(config, *layout(ranks), f"run.root={tmp_path}")
    assert_losses_close(lines, expected)
    assert scalars(lines, "eval/accuracy") == pytest.approx(scalars(expected, "eval/accuracy"))
    assert bool(scalars(lines, "eval/accuracy")) == model.startswith("classifier")


@pytest.mark.parametrize(
    "model", tiered(["masked_lm", "masked_lm on shared landmarks", "classifier"], ["classifier"])
)
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(model, one_process, tmp_path):
    config, whole = one_process(model)
    options = (f"run.root={tmp_path}", "checkpoint.every=2")
    # The decay of the whole run: it must not depend on training.steps.
    steps = ("schedule.decay_steps=2",)
    train(config, 1, *options, *steps, "training.steps=2")
    assert_resumed_bit_identically(train(config, 1, *options, *steps), whole)


def test_a_classifier_starts_from_the_weights_of_a_masked_language_model(one_process, corpora, tmp_path):
    config, _ = one_process("masked_lm")
    path = tmp_path / "config.yaml"
    model = MODELS["masked_lm"].replace("masked_lm", "classifier, classifier: {num_classes: 2}")
    path.write_text(CONFIG.format(root=tmp_path, model=model, corpus=corpora["classifier"], documents="true"))
    # Updates below the precision of float32 leave the weights unchanged.
    still = ("optimizer.lr=1e-30", f"init.from={config.parent / 'run'}")
    train(path, 1, *still)
    before, after = (
        CheckpointTensors(find_checkpoint(folder / "run")) for folder in (config.parent, tmp_path)
    )
    assert after.names - before.names == {"7.output.weight", "7.output.bias"}
    assert before.names < after.names
    for name in before.names:
        assert torch.equal(after.read(name, [WEIGHT])[WEIGHT], before.read(name, [WEIGHT])[WEIGHT]), name


@pytest.mark.parametrize(
    "model",
    tiered(
        ["masked_lm", "masked_lm on shared landmarks", "classifier", "classifier of pairs"],
        ["masked_lm", "classifier of pairs"],
    ),
)
def test_evaluating_a_run_gives_the_metrics_of_training(model, one_process):
    config, lines = one_process(model)
    [(loss, accuracy)] = run_ranks(_evaluate, 1, config.parent / "run")
    # The sums are grouped differently.
    assert loss == pytest.approx(scalars(lines, "eval/loss")[-1], rel=1e-5)
    assert [accuracy] == pytest.approx(scalars(lines, "eval/accuracy")[-1:] or [None])


@pytest.mark.parametrize("model", tiered(["masked_lm on shared landmarks", "classifier"], ["classifier"]))
def test_an_evaluation_of_longer_sequences_than_the_model_has_weights_for_is_refused(model, one_process):
    config, _ = one_process(model)
    with pytest.raises(
        UserError, match=r"seq_len=65 exceeds the 64 positions that the model has weights for; give at"
    ):
        evaluate_run(config.parent / "run", seq_len=65)


def _evaluate(folder, draws=None):
    result = evaluate_run(folder, draws=draws)
    return result.loss, result.accuracy


@pytest.mark.second
def test_a_classifier_with_learned_kernels_votes_over_draws_of_their_noise(one_process, tmp_path):
    config, _ = one_process("classifier")
    kernels = "model.attention_pattern=[gmm_prf, skyformer]"
    lines = train(config, 1, kernels, "training.steps=1", f"run.root={tmp_path}")
    run = tmp_path / "run"
    fixed_noise, *votes = (run_ranks(_evaluate, 1, run, draws)[0] for draws in (None, 4, 4))
    assert fixed_noise[0] == pytest.approx(scalars(lines, "eval/loss")[-1], rel=1e-5)
    assert votes[0] == votes[1] != fixed_noise


@pytest.mark.second
def test_a_classifier_generalizes_a_rule_to_new_examples(tmp_path):
    """The rule: which of two letters is more frequent. It has to be counted and cannot be memorized."""
    draw = random.Random(1)
    with (tmp_path / "rows.jsonl").open("w") as rows:
        for _ in range(300):
            text = "".join(draw.choices("abcdef", k=draw.randint(5, 40)))
            rows.write(json.dumps({"text": text, "label": text.count("a") > text.count("b")}) + "\n")
    prepare = f"prepare --source {tmp_path}/rows.jsonl --labels label --tokenizer byte --out {tmp_path}/one"
    assert main(f"{prepare} --validation-fraction 0.2 --workers 1".split()) == 0
    config = write_config(tmp_path, {"classifier": tmp_path / "one"}, "classifier")
    batches = ("training.steps=100", "training.global_batch_size=32", "training.micro_batch_size=32")
    model = ("model.num_layers=2", "model.classifier.pooling=mean", "optimizer.lr=3e-3")
    lines = train(config, 1, *batches, *model, "training.eval_samples=50")
    assert scalars(lines, "train/loss")[0] > 0.6, "ln 2 is chance"
    assert scalars(lines, "eval/accuracy")[-1] >= 0.9


@pytest.mark.second
def test_a_masked_language_model_learns_from_text(corpora, tmp_path):
    config = write_config(tmp_path, corpora, "masked_lm")
    longer = ("training.steps=60", "training.micro_batch_size=8", "training.eval_samples=50")
    lines = train(config, 1, *longer, "optimizer.lr=3e-3")
    first, last = scalars(lines, "eval/loss")
    # ln 257 = 5.55 is chance; 3.4 is the entropy of single bytes of source text.
    assert first > 5.4
    assert last < 3.6
    assert not scalars(lines, "eval/bits_per_byte"), "a masked loss is not a code length of the text"

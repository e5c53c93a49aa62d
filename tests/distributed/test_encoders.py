"""Encoders on any layout give the losses of one process, and go on where they were stopped."""

import json
import random
from functools import cache

import pytest
import torch

from launch.cli import main
from megakernel.checkpoint.files import CheckpointTensors
from megakernel.checkpoint.trained_run import find_checkpoint
from megakernel.checkpoint.universal import WEIGHT
from megakernel.evaluation import evaluate_run
from tests.distributed.processes import run_ranks
from tests.distributed.training_run import assert_alike, assert_continued, layout, scalars, train
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
    "classifier": (
        "kind: classifier, classifier: {num_classes: 2, pooling: cls, head: mlp}, "
        "attention_pattern: [softmax, performer], position: learned"
    ),
    "classifier of pairs": (
        "kind: classifier, classifier: {num_classes: 3, documents: 2}, attention_pattern: [linear, softmax]"
    ),
}
"""Every head and pooling, every kind of position, and mechanisms of both costs."""

LAYOUTS = [
    *("dp2", "dp2 zero 1", "dp2 zero 2", "dp2 zero 3"),
    *("tp2", "tp2 sequence parallel", "cp2", "cp2 ring", "pp2"),
]

PADDED = [name for name in LAYOUTS if not name.startswith("cp2")]
CASES = [
    *(("masked_lm", name) for name in LAYOUTS),
    ("masked_lm on landmarks", "cp2"),
    *(("classifier", name) for name in PADDED),
    ("classifier of pairs", "dp2"),
    ("classifier of pairs", "tp2 sequence parallel"),
    ("classifier of pairs", "pp2"),
]
FIRST = [
    ("masked_lm", "tp2 sequence parallel"),
    ("masked_lm", "cp2 ring"),
    ("masked_lm", "dp2 zero 2"),
    ("masked_lm on landmarks", "cp2"),
    ("classifier", "tp2"),
    ("classifier", "dp2 zero 3"),
    ("classifier of pairs", "pp2"),
]
"""Of the first tier: every way to share out a model, every model."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory, corpus):
    """Prepared folders by kind of model: text, and labelled sequences of one and of two texts."""
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
    corpus = corpora["masked_lm" if name.startswith("masked_lm") else name]
    # Landmarks of whole sequences mix what lies in a sequence.
    documents = str("landmarks" not in name).lower()
    path.write_text(CONFIG.format(root=folder, model=MODELS[name], corpus=corpus, documents=documents))
    return path


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, corpora):
    """What one process measures of a model, trained when first asked for."""

    @cache
    def measured(name):
        config = write_config(tmp_path_factory.mktemp("one"), corpora, name)
        return config, train(config, 1)

    return measured


@pytest.mark.parametrize(("model", "ranks"), tiered(CASES, FIRST))
def test_layout_gives_the_losses_of_one_process(model, ranks, one_process, tmp_path):
    config, expected = one_process(model)
    found = train(config, *layout(ranks), f"run.root={tmp_path}")
    assert_alike(found, expected)
    assert scalars(found, "eval/accuracy") == pytest.approx(scalars(expected, "eval/accuracy"))
    assert bool(scalars(found, "eval/accuracy")) == model.startswith("classifier")


@pytest.mark.parametrize("model", tiered(["masked_lm", "classifier"], ["classifier"]))
def test_stopped_and_continued_the_numbers_are_the_same_bit_for_bit(model, one_process, tmp_path):
    config, whole = one_process(model)
    options = (f"run.root={tmp_path}", "checkpoint.every=2")
    # A schedule that does not move with the number of steps, as in the whole run.
    steps = ("schedule.decay_steps=2",)
    train(config, 1, *options, *steps, "training.steps=2")
    assert_continued(train(config, 1, *options, *steps), whole)


def test_a_classifier_starts_from_the_weights_of_a_masked_language_model(one_process, corpora, tmp_path):
    config, _ = one_process("masked_lm")
    path = tmp_path / "config.yaml"
    model = MODELS["masked_lm"].replace("masked_lm", "classifier, classifier: {num_classes: 2}")
    path.write_text(CONFIG.format(root=tmp_path, model=model, corpus=corpora["classifier"], documents="true"))
    # Steps too small to be seen in float32 leave the weights as they came.
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
    "model", tiered(["masked_lm", "classifier", "classifier of pairs"], ["masked_lm", "classifier of pairs"])
)
def test_evaluating_a_run_finds_what_training_measured(model, one_process):
    config, lines = one_process(model)
    [(loss, accuracy)] = run_ranks(_evaluated, 1, config.parent / "run")
    # The sums are over other numbers of terms at once.
    assert loss == pytest.approx(scalars(lines, "eval/loss")[-1], rel=1e-5)
    assert [accuracy] == pytest.approx(scalars(lines, "eval/accuracy")[-1:] or [None])


def _evaluated(folder, draws=None):
    found = evaluate_run(folder, draws=draws)
    return found.loss, found.accuracy


@pytest.mark.second
def test_a_classifier_with_learned_kernels_votes_over_their_noise(one_process, tmp_path):
    config, _ = one_process("classifier")
    kernels = "model.attention_pattern=[gmm_prf, skyformer]"
    lines = train(config, 1, kernels, "training.steps=1", f"run.root={tmp_path}")
    run = tmp_path / "run"
    held, *votes = (run_ranks(_evaluated, 1, run, draws)[0] for draws in (None, 4, 4))
    assert held[0] == pytest.approx(scalars(lines, "eval/loss")[-1], rel=1e-5)
    assert votes[0] == votes[1] != held


@pytest.mark.second
def test_a_classifier_learns_a_rule_from_examples_it_then_knows_in_new_ones(tmp_path):
    """Which of two letters a word holds more often: to be counted, not remembered."""
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
    found = train(config, 1, *batches, *model, "training.eval_samples=50")
    assert scalars(found, "train/loss")[0] > 0.6, "ln 2 is knowing nothing"
    assert scalars(found, "eval/accuracy")[-1] >= 0.9


def test_a_masked_language_model_learns_from_text(corpora, tmp_path):
    config = write_config(tmp_path, corpora, "masked_lm")
    longer = ("training.steps=60", "training.micro_batch_size=8", "training.eval_samples=50")
    found = train(config, 1, *longer, "optimizer.lr=3e-3")
    first, last = scalars(found, "eval/loss")
    # ln 257 = 5.55 is knowing nothing, 3.4 how often each byte of source text comes.
    assert first > 5.4
    assert last < 3.6
    assert not scalars(found, "eval/bits_per_byte"), "not a code length of the text"

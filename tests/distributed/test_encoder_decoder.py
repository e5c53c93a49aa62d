"""Encoder-decoders have the losses of one process on any layout, continue where they were stopped, and translate."""

import json
import random
from functools import cache

import pytest
import torch

from launch.cli import main
from megakernel.checkpoint.files import CheckpointTensors
from megakernel.checkpoint.trained_run import find_checkpoint
from megakernel.checkpoint.whole_tensors import WEIGHT
from megakernel.evaluation import evaluate_run
from megakernel.evaluation.translation import TranslationScore
from tests.distributed.processes import RankFailedError, run_ranks
from tests.distributed.training_run import (
    assert_losses_close,
    assert_resumed_bit_identically,
    layout,
    metrics,
    scalars,
    train,
)
from tests.distributed.training_run import write_config as write_language_model
from tests.tiers import tiered

CONFIG = """
run: {{name: run, seed: 7, root: {root}}}
model: {{kind: encoder_decoder, num_layers: 2, hidden_size: 32, num_heads: 4, {model}}}
training: {{steps: 3, seq_len: 32, global_batch_size: 8, micro_batch_size: 2,
  dtype: float32, log_every: 1, eval_samples: 6}}
optimizer: {{lr: 1e-3}}
schedule: {{warmup_steps: 1}}
data: {{num_workers: {workers}, train: {corpus}}}
logging: {{tensorboard: false}}
"""

MODELS = {
    "softmax": "encoder: {num_layers: 2}, attention: softmax, position: sinusoidal, num_kv_heads: 2",
    "FLuRKA": (
        "encoder: {num_layers: 1, attention: {preset: flurka_performer, compression: {rank: 8}}, "
        "cross_attention: hedgehog}, attention: {preset: flurka, compression: {block_size: 8, rank: 2}}"
    ),
    "mixtures": (
        "encoder: {num_layers: 1, attention: mgk, cross_attention: {preset: mlk, mixture: {kind: projected}}}, "
        "attention: mgk, tie_embeddings: false, qk_norm: true, qk_norm_width: all"
    ),
}

CASES = [
    *(("softmax", f"dp2 zero {stage}") for stage in range(4)),
    *(("softmax", name) for name in ("tp2", "tp2 sequence parallel", "dp2 full recompute")),
    *(("FLuRKA", name) for name in ("tp2 sequence parallel", "dp2 zero 3", "tp2 full recompute offload")),
    *(("mixtures", name) for name in ("tp2", "tp2 sequence parallel dp2 zero 1")),
]
FIRST_TIER = [("softmax", "dp2 zero 1"), ("FLuRKA", "tp2 sequence parallel")]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A prepared folder of words and the same words in reverse order."""
    folder = tmp_path_factory.mktemp("pairs")
    draw = random.Random(0)
    with (folder / "rows.jsonl").open("w") as rows:
        for _ in range(2000):
            words = draw.choices(["one", "two", "three", "four", "five", "six"], k=draw.randint(1, 4))
            row = {"text": " ".join(words), "reversed": " ".join(words[::-1])}
            rows.write(json.dumps(row) + "\n")
    prepare = f"prepare --source {folder}/rows.jsonl --tokenizer words --second-text-key reversed"
    assert main(f"{prepare} --validation-fraction 0.2 --workers 1 --out {folder}/out".split()) == 0
    return folder / "out"


def write_config(folder, pairs, name, workers=0):
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(root=folder, model=MODELS[name], corpus=pairs, workers=workers))
    return path


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, pairs):
    """Model -> its configuration and metrics in one process, trained when first asked for."""

    @cache
    def measured(name):
        config = write_config(tmp_path_factory.mktemp("one"), pairs, name)
        return config, train(config, 1)

    return measured


@pytest.mark.parametrize(("model", "ranks"), tiered(CASES, FIRST_TIER))
def test_every_layout_has_the_losses_of_one_process(model, ranks, one_process, tmp_path):
    config, expected = one_process(model)
    lines = train(config, *layout(ranks), f"run.root={tmp_path}")
    assert_losses_close(lines, expected)


@pytest.mark.parametrize("model", tiered(MODELS, ["softmax"]))
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(model, one_process, tmp_path):
    config, whole = one_process(model)
    options = (f"run.root={tmp_path}", "checkpoint.every=2", "schedule.decay_steps=2")
    train(config, 1, *options, "training.steps=2")
    assert_resumed_bit_identically(train(config, 1, *options), whole)


@pytest.mark.second
def test_dropout_does_not_depend_on_the_layout(one_process, tmp_path):
    config, plain = one_process("softmax")
    dropout = "model.dropout={attention: 0.1, residual: 0.1, embedding: 0.1}"
    lines = train(config, 1, f"run.root={tmp_path}/one", dropout)
    assert scalars(lines, "train/loss") != scalars(plain, "train/loss")
    for ranks in ("dp2", "tp2 sequence parallel", "full recompute"):
        found = train(config, *layout(ranks), f"run.root={tmp_path}/{ranks}".replace(" ", "-"), dropout)
        assert_losses_close(found, lines)


def test_evaluating_a_run_gives_the_loss_of_training(one_process):
    config, lines = one_process("FLuRKA")
    [loss] = run_ranks(_evaluate, 1, config.parent / "run")
    assert loss == pytest.approx(scalars(lines, "eval/loss")[-1], rel=1e-5)


def _evaluate(folder):
    return evaluate_run(folder).loss


def test_a_decoder_starts_from_the_weights_of_another_mechanism(one_process, pairs, tmp_path):
    """As FLuRKA's up-training does: every weight but those of the new mechanism is the earlier run's."""
    config, lines = one_process("softmax")
    changes = (
        "model.attention=linear",
        "model.encoder.attention=linear",
        f"init.from={config.parent / 'run'}",
    )
    still = ("optimizer.lr=1e-30", "training.eval_samples=6", f"run.root={tmp_path}")
    started = train(config, 1, *changes, *still)
    same = train(config, 1, f"init.from={config.parent / 'run'}", *still, "run.name=same")
    assert scalars(same, "eval/loss")[0] == pytest.approx(scalars(lines, "eval/loss")[-1], rel=1e-6)
    assert scalars(started, "eval/loss")[0] != scalars(same, "eval/loss")[0]


def test_another_encoder_keeps_the_mechanism_of_cross_attention(one_process, pairs, tmp_path):
    config, _ = one_process("FLuRKA")
    start, still = f"init.from={config.parent / 'run'}", ("optimizer.lr=1e-30", f"run.root={tmp_path}")
    train(config, 1, start, "model.encoder.attention=linear", *still)
    before, after = (
        CheckpointTensors(find_checkpoint(folder / "run")) for folder in (config.parent, tmp_path)
    )
    names = {name for name in before.names if ".cross_attention.core." in name}
    assert names
    assert names <= after.names
    for name in names:
        assert torch.equal(after.read(name, [WEIGHT])[WEIGHT], before.read(name, [WEIGHT])[WEIGHT]), name


def test_weights_of_an_encoder_with_more_layers_are_refused(one_process, tmp_path):
    config, _ = one_process("softmax")
    start = (f"init.from={config.parent / 'run'}", f"run.root={tmp_path}")
    with pytest.raises(
        RankFailedError,
        match=r"UserError: init\.from has a model with 2 layers in its encoder, and this one has 1, .*; give",
    ):
        train(config, 1, *start, "model.encoder.num_layers=1")


@pytest.mark.second
def test_a_model_learns_to_turn_the_words_of_a_text_around(pairs, tmp_path, capsys):
    """It has to read the source: the order of its words is random. With the loader's workers, as users have it."""
    config = write_config(tmp_path, pairs, "softmax", workers=2)
    longer = ("training.steps=300", "training.global_batch_size=64", "training.micro_batch_size=64")
    size = (
        "training.log_every=100",
        "training.seq_len=8",
        "optimizer.lr=3e-3",
        "training.eval_samples=60",
        "model.hidden_size=64",
    )
    assert main(["pretrain", str(config), *longer, *size]) == 0
    capsys.readouterr()
    run = tmp_path / "run"
    assert scalars(metrics(run), "eval/loss")[-1] < 0.1
    assert main(["evaluate", str(run), "--task", "translation:samples=60", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["bleu"] > 85
    assert found["unended"] == found["cut_sources"] == 0
    assert main(["generate", str(run), "--prompt", "one two three", "--beams", "2"]) == 0
    assert capsys.readouterr().out == "three two one\n"


def test_a_model_with_parameters_of_positions_writes_at_most_so_many_tokens(one_process, capsys):
    config, _ = one_process("FLuRKA")
    run = str(config.parent / "run")
    capsys.readouterr()
    assert main(["generate", run, "--prompt", "one two"]) == 0
    assert len(capsys.readouterr().out.split()) <= 32
    for options, message in (
        (["--prompt", "one", "--max-new-tokens", "33"], "max_new_tokens=33 exceeds the model's 32 positions"),
        (
            ["--prompt", " ".join(["two"] * 40)],
            "prompt 1 has 41 tokens with its end, and the model 32 positions",
        ),
        (["--prompt", " "], "prompt 1 is empty"),
        (["--prompt", "one", "--top-k", "3"], "--top-k 3 has no effect"),
    ):
        assert main(["generate", run, *options]) == 2
        assert message in capsys.readouterr().err


def test_a_source_longer_than_those_of_training_is_translated_and_named(one_process, tmp_path, capsys):
    config, _ = one_process("softmax")
    (tmp_path / "texts").write_text("".join(json.dumps({"prompt": "two " * n}) + "\n" for n in (31, 32)))
    capsys.readouterr()
    options = ["--prompts", str(tmp_path / "texts"), "--max-new-tokens", "2"]
    assert main(["generate", str(config.parent / "run"), *options]) == 0
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert [line["is_long"] for line in lines] == [False, True]
    assert "longer than sources in training (training.seq_len=32): prompt 2\n" in printed.err
    assert ("without an end" in printed.err) == (not all(line["is_complete"] for line in lines))


def test_an_evaluation_of_translations_is_recorded_with_its_texts(one_process, capsys):
    config, _ = one_process("FLuRKA")
    run = config.parent / "run"
    spec = "translation:samples=8,beams=2"
    capsys.readouterr()
    assert main(["evaluate", str(run), "--task", spec, "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert len(found["texts"]) == 8
    assert (found["cut_sources"], found["seq_len"]) == (0, 32)
    assert all(text["reference"].split() == text["source"].split()[::-1] for text in found["texts"])
    [file] = (run / "evaluation").glob("step_3/translation*.json")
    assert json.loads(file.read_text())["scalars"] == {
        "bleu": found["bleu"],
        "length_ratio": found["length_ratio"],
    }
    assert file.with_suffix(".md").read_text().count("\n| ") == 2 + 5, (
        "a head of two lines, five translations"
    )


def test_the_table_of_translations_says_what_was_cut():
    numbers = {
        "bleu": 20.0,
        "precisions": (50.0, 30.0, 20.0, 10.0),
        "length_ratio": 0.8,
        "brevity_penalty": 0.78,
    }
    place = {"task": "translation", "run": "runs/x", "step": 3, "signature": "tok:13a", "seq_len": 32}
    texts = (("one", "eins", "eins"),)
    whole = {"unended": 0, "cut_sources": 0, "unknown_sources": 0, "unknown_references": 0, "distinct": 1}
    unknown = "words unknown to the tokenizer, which BLEU takes as equal: in 3 references, 4 sources"
    for changes, expected in (
        ({}, []),
        (
            {"unended": 2, "cut_sources": 1},
            ["without an end within 32 tokens: 2 translations", "cut at 32 tokens: 1 sources"],
        ),
        ({"unknown_references": 3, "unknown_sources": 4}, [unknown]),
    ):
        score = TranslationScore(**numbers, **place, **{**whole, **changes}, texts=texts)
        assert list(score.table().below[2:]) == expected
        assert score.table().below[0].startswith("BLEU 20.00 of 1 pairs (50.0/")
    score = TranslationScore(**numbers, **place, **whole, texts=texts * 3)
    assert score.table().below[0].startswith("BLEU 20.00 of 3 pairs, 1 of them distinct, (50.0/")


def test_a_model_that_does_not_translate_is_refused_by_the_task(corpus, tmp_path, capfd):
    config = write_language_model(tmp_path, corpus)
    assert main(["pretrain", str(config), "training.steps=1", "training.eval_samples=0"]) == 0
    _, _, following = capfd.readouterr().out.partition("done; next:")
    assert "megakernel generate" in following
    assert "megakernel evaluate" not in following, "without validation samples it measures nothing"
    assert main(["evaluate", str(tmp_path / "run"), "--task", "translation"]) == 2
    assert "does not translate; give a run of an encoder_decoder, or --task lm" in capfd.readouterr().err
    assert main(["generate", str(tmp_path / "run"), "--prompt", "x", "--beams", "2"]) == 2
    assert "--beams 2 has no effect" in capfd.readouterr().err

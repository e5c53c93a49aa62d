"""A kernelized run is exported to a folder that transformers and lm-evaluation-harness can use, and imported again."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from launch.cli import main
from megakernel.checkpoint.one_process import one_process_model
from megakernel.checkpoint.trained_run import TrainedRun
from megakernel.generation import Sampling, generate_texts
from tests.distributed.processes import RankFailedError
from tests.distributed.training_run import train, write_config

OPTIONS = ("training.steps=2", "training.eval_samples=0", "logging.tensorboard=false")
NO_UPDATE = ("optimizer.lr=1e-30", "optimizer.weight_decay=0", "training.steps=1", *OPTIONS[1:])
"""One training step with an update too small to change any weight."""


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    """FLuRKA with both kinds of near windows, softmax and Performer, on two tensor ranks with growing sequences."""
    config = write_config(tmp_path_factory.mktemp("runs"), corpus)
    grows = "training.seq_len_schedule=[{until_step: 1, seq_len: 64, rope_base: 500}]"
    train(config, 2, *OPTIONS, "parallel.tensor=2", "optimizer.lr=1e-2", grows, "checkpoint.every=1")
    return config.parent / "run"


@pytest.fixture(scope="module")
def exported(run):
    assert main(["export", str(run), "--to", str(run.parent / "exported")]) == 0
    return run.parent / "exported"


@pytest.fixture(scope="module")
def model(exported):
    return AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True).eval()


def test_the_exported_folder_is_complete_and_the_command_says_how_to_load_it(run, tmp_path, capsys):
    assert main(["export", str(run), "--to", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    output = capsys.readouterr().out
    assert "MegakernelForCausalLM in bfloat16, with its tokenizer" in output
    assert "trust_remote_code=True" in output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["dtype"], config["vocab_size"]) == ("megakernel", "bfloat16", 257)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 256
    assert "suppress_tokens" not in generation  # padding rows of the embedding are not exported
    dtypes = {x.dtype for x in load_file(tmp_path / "out" / "model.safetensors").values()}
    assert dtypes == {torch.bfloat16, torch.float32}  # random features stay in float32


@pytest.mark.second
def test_an_export_that_needs_the_package_says_so(corpus, tmp_path, capsys):
    config = write_config(tmp_path, corpus)
    train(config, 1, *OPTIONS, "training.steps=1", "model.attention_pattern=null", "model.attention=smlk")
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    reason = "which alone has kernel (elu) with mixture keys"
    assert f"it needs Megakernel installed, {reason}\n" in capsys.readouterr().out
    assert f"{reason.removeprefix('which alone has ')}" in (tmp_path / "out" / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert len(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)[0]) > 3


def test_the_model_card_says_how_to_load_the_folder_and_lists_evaluations(run, exported, tmp_path):
    card = (exported / "README.md").read_text()
    assert 'AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)' in card
    assert "flurka (hedgehog)" in card
    assert "Apache-2.0" in card
    assert "Evaluation" not in card
    evaluation = run / "evaluation" / "step_2"
    evaluation.mkdir(parents=True)
    (evaluation / "perplexity.md").write_text("| position | loss |\n|---|---|\n| all | 3.2 |\n")
    try:
        assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 0
    finally:
        (evaluation / "perplexity.md").unlink()
    assert (tmp_path / "out" / "README.md").read_text().endswith("| all | 3.2 |\n")


def test_rotary_frequencies_and_length_are_those_of_the_exported_step(run, exported, tmp_path):
    assert main(["export", str(run), "--to", str(tmp_path / "out"), "--step", "1"]) == 0
    settings = []
    for folder in (tmp_path / "out", exported):
        config = json.loads((folder / "config.json").read_text())
        settings.append((config["rotary_base"], config["max_position_embeddings"]))
    assert settings == [(500.0, 64), (10_000.0, 128)]


@torch.no_grad()
def test_exported_logits_match_the_run(run, model):
    tokens = torch.randint(256, (2, 100), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(100).expand(2, -1)
    run_model = one_process_model(TrainedRun.find(run), 257, torch.device("cpu"))
    expected = run_model.logits(run_model.hidden(tokens, positions))
    assert expected.std() > 0.1
    torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("prompt", ["import ", "def f(x):\n    return é"])
def test_greedy_text_equals_that_of_megakernel_generate(prompt, run, exported, model):
    tokenizer = AutoTokenizer.from_pretrained(exported, trust_remote_code=True)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    generated = model.generate(ids, max_new_tokens=60, do_sample=False)[0, ids.shape[1] :]
    text = tokenizer.decode(generated, skip_special_tokens=True)
    expected = "".join(
        piece.text
        for piece in generate_texts(run, [prompt], max_new_tokens=60, sampling=Sampling(temperature=0))
    )
    assert text == expected != ""


def test_a_pipeline_loads_the_folder_and_writes_the_same_text(exported, model):
    write = pipeline("text-generation", model=str(exported), trust_remote_code=True, device="cpu")
    prompts = ["import ", "def f(x):\n    return é"]
    # A batch, which the pipeline pads.
    replies = write(prompts, batch_size=2, max_new_tokens=20, do_sample=False, return_full_text=False)
    for prompt, (reply,) in zip(prompts, replies, strict=True):
        ids = write.tokenizer(prompt, return_tensors="pt").input_ids
        alone = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
        assert reply["generated_text"] == write.tokenizer.decode(alone, skip_special_tokens=True) != ""


def test_save_pretrained_writes_the_same_folder_bit_for_bit(exported, model, tmp_path):
    model.save_pretrained(tmp_path)
    assert_same_tensors(exported, tmp_path)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (exported, tmp_path))
    assert before == after
    assert (tmp_path / "modeling_megakernel.py").read_bytes() == (
        exported / "modeling_megakernel.py"
    ).read_bytes()


def test_an_export_imported_and_exported_again_is_bit_identical(exported, corpus, tmp_path):
    fragment = tmp_path / "model.yaml"
    assert main(["import", str(exported), "--to", str(fragment)]) == 0
    config = write_config(tmp_path, corpus)
    text = config.read_text()
    config.write_text(
        f"extends: {fragment.name}\n" + text[: text.index("model:")] + text[text.index("parallel:") :]
    )
    train(config, 2, *NO_UPDATE, "parallel.pipeline=2", "parallel.zero_stage=1")
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    assert_same_tensors(exported, tmp_path / "out")


@pytest.mark.second
def test_starting_from_an_export_with_data_of_another_tokenizer_is_refused(exported, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} words of another tokenizer. " * 20)
    other = tmp_path / "bpe"
    command = (
        f"prepare --source {tmp_path / 'text'} --tokenizer bpe:270 --out {other} --validation-fraction 0"
    )
    assert main(command.split()) == 0
    config = write_config(tmp_path, other)
    with pytest.raises(RankFailedError) as caught:
        train(config, 1, *NO_UPDATE, f"init.from={exported}")
    assert f"init.from={exported} has another tokenizer than data.train={other}; " in str(caught.value)


TASK = """
task: lines
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
LINES = ["import os\n", "def f(x):\n    return x + 1\n", "class A:\n    pass  # é\n"]


@pytest.mark.second
@torch.no_grad()
def test_lm_evaluation_harness_measures_the_models_loss(exported, model, tmp_path):
    data = tmp_path / "lines.jsonl"
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    (tmp_path / "lines.yaml").write_text(TASK.format(data=data))
    arguments = (
        f"--model hf --model_args pretrained={exported},trust_remote_code=True --device cpu --batch_size 2"
    )
    task = f"--tasks lines --include_path {tmp_path} --output_path {tmp_path / 'results'}"
    # `accelerate` would take a LOCAL_RANK left by a training run for that of a launcher.
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *arguments.split(), *task.split()],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "results").rglob("results_*.json")
    bits_per_byte = json.loads(file.read_text())["results"]["lines"]["bits_per_byte,none"]
    nats = size = 0.0
    for line in LINES:
        ids = torch.tensor([[256, *line.encode()]])
        nats += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        size += len(line.encode())
    assert bits_per_byte == pytest.approx(nats / size / math.log(2), rel=1e-4)


def assert_same_tensors(one, other):
    before, after = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)

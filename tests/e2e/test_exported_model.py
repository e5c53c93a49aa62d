"""A kernelized run leaves as a folder that transformers and lm-evaluation-harness use, and comes in again."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.cli import main
from megakernel.checkpoint.one_process import one_process_model
from megakernel.checkpoint.trained_run import TrainedRun
from megakernel.generation import Sampling, generate_texts
from tests.distributed.processes import RankFailedError
from tests.distributed.training_run import train, write_config

OPTIONS = ("training.steps=2", "training.eval_samples=0", "logging.tensorboard=false")
STILL = ("optimizer.lr=1e-30", "optimizer.weight_decay=0", "training.steps=1", *OPTIONS[1:])
"""A step of which nothing is left: too small for any weight to change."""


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    """FLuRKA with both kinds of near windows, softmax and Performer, over two tensor ranks; its sequences grow."""
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


def test_a_folder_is_whole_and_says_how_it_is_loaded(run, tmp_path, capsys):
    assert main(["export", str(run), "--to", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "MegakernelForCausalLM in bfloat16, with its tokenizer" in said
    assert "trust_remote_code=True" in said
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["dtype"], config["vocab_size"]) == ("megakernel", "bfloat16", 257)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 256
    assert "suppress_tokens" not in generation  # rows that pad the embedding stay in the run
    dtypes = {x.dtype for x in load_file(tmp_path / "out" / "model.safetensors").values()}
    assert dtypes == {torch.bfloat16, torch.float32}  # random features keep their digits


def test_the_card_says_how_the_folder_is_loaded_and_what_was_measured(run, exported, tmp_path):
    card = (exported / "README.md").read_text()
    assert 'AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)' in card
    assert "flurka (hedgehog)" in card
    assert "Apache-2.0" in card
    assert "Evaluation" not in card
    measured = run / "evaluation" / "step_2"
    measured.mkdir(parents=True)
    (measured / "perplexity.md").write_text("| position | loss |\n|---|---|\n| all | 3.2 |\n")
    try:
        assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 0
    finally:
        (measured / "perplexity.md").unlink()
    assert (tmp_path / "out" / "README.md").read_text().endswith("| all | 3.2 |\n")


def test_frequencies_are_those_that_the_weights_know(run, exported, tmp_path):
    assert main(["export", str(run), "--to", str(tmp_path / "out"), "--step", "1"]) == 0
    found = []
    for folder in (tmp_path / "out", exported):
        config = json.loads((folder / "config.json").read_text())
        found.append((config["model"]["rope_base"], config["max_position_embeddings"]))
    assert found == [(500.0, 64), (10_000.0, 128)]


@torch.no_grad()
def test_logits_are_those_of_the_run(run, model):
    tokens = torch.randint(256, (2, 100), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(100).expand(2, -1)
    ours = one_process_model(TrainedRun.find(run), 257, torch.device("cpu"))
    expected = ours.logits(ours.hidden(tokens, positions))
    assert expected.std() > 0.1
    torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("prompt", ["import ", "def f(x):\n    return é"])
def test_the_likeliest_text_is_that_of_megakernel_generate(prompt, run, exported, model):
    tokenizer = AutoTokenizer.from_pretrained(exported, trust_remote_code=True)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    found = model.generate(ids, max_new_tokens=60, do_sample=False)[0, ids.shape[1] :]
    text = tokenizer.decode(found, skip_special_tokens=True)
    expected = "".join(
        piece.text
        for piece in generate_texts(run, [prompt], max_new_tokens=60, sampling=Sampling(temperature=0))
    )
    assert text == expected != ""


def test_what_is_saved_again_is_the_same_bit_for_bit(exported, model, tmp_path):
    model.save_pretrained(tmp_path)
    assert_same_tensors(exported, tmp_path)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (exported, tmp_path))
    assert before == after
    assert (tmp_path / "modeling_megakernel.py").read_bytes() == (
        exported / "modeling_megakernel.py"
    ).read_bytes()


def test_what_came_out_goes_in_bit_for_bit(exported, corpus, tmp_path):
    fragment = tmp_path / "model.yaml"
    assert main(["import", str(exported), "--to", str(fragment)]) == 0
    config = write_config(tmp_path, corpus)
    text = config.read_text()
    config.write_text(
        f"extends: {fragment.name}\n" + text[: text.index("model:")] + text[text.index("parallel:") :]
    )
    train(config, 2, *STILL, "parallel.pipeline=2", "parallel.zero_stage=1")
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    assert_same_tensors(exported, tmp_path / "out")


def test_data_of_another_tokenizer_is_refused(exported, tmp_path):
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
        train(config, 1, *STILL, f"init.from={exported}")
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
def test_lm_evaluation_harness_sees_these_logits(exported, model, tmp_path):
    data = tmp_path / "lines.jsonl"
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    (tmp_path / "lines.yaml").write_text(TASK.format(data=data))
    arguments = (
        f"--model hf --model_args pretrained={exported},trust_remote_code=True --device cpu --batch_size 2"
    )
    place = f"--tasks lines --include_path {tmp_path} --output_path {tmp_path / 'results'}"
    # Of a shell in which no training has run: `accelerate` takes LOCAL_RANK for a launcher's.
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *arguments.split(), *place.split()],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "results").rglob("results_*.json")
    found = json.loads(file.read_text())["results"]["lines"]["bits_per_byte,none"]
    nats = size = 0.0
    for line in LINES:
        ids = torch.tensor([[256, *line.encode()]])
        nats += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        size += len(line.encode())
    assert found == pytest.approx(nats / size / math.log(2), rel=1e-4)


def assert_same_tensors(one, other):
    before, after = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)

"""Small studies from end to end: data are prepared, models trained, up-trained and evaluated, pages written."""

import re
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.experiments.__main__ import main
from launch.cli import main as launch
from megakernel.checkpoint.trained_run import find_checkpoint
from megakernel.training.run_folder import RunLock
from tests.e2e.test_readme import REPOSITORY

pytestmark = pytest.mark.second

STUDY = f"""
title: A small study
text: "{{training.steps}} steps of {{training.global_batch_size}} sequences."
config: {REPOSITORY}/configs/tasks/mqar.yaml
overrides:
  model.num_layers: 1
  model.hidden_size: 16
  model.num_heads: 1
  training.seq_len: 32
  training.steps: 3
  training.global_batch_size: 4
  training.micro_batch_size: 4
  training.eval_every: 3
  training.eval_samples: 4
  training.log_every: 1
  schedule.warmup_steps: 0
blocks: {{block_size: 8, rank: 2, sequence_rank: 4}}
data:
  source: task:mqar:pairs=4,length={{seq_len}}
  options: {{validation-fraction: 0.2, max-documents: "{{examples}}"}}
  out: data/{{examples}}
  extra_steps: 3
tasks: {{answers: "mqar:pairs=4,length={{seq_len}},samples=4"}}
"""
COLUMNS = """
columns:
  model: name
  loss by step: {measure: metric, tag: eval/loss, pick: all, format: .3f, separator: ", "}
  right: {measure: task, of: answers, value_of: accuracy, format: .1%, bold: true}
  state: state_size
curves: eval/loss
"""
UPTRAINED = """
start: {overrides: {training.steps: 2, data.isolate_documents: false}, export: true}
rows: [start, swapped, main]
columns:
  model: name
  loss: {measure: report, value_of: loss, format: .3f}
  tokens: {measure: report, value_of: tokens}
  right: {measure: task, of: answers, value_of: accuracy, format: .1%}
checks: [transformers_agree]
"""
VOTES = f"""
title: Votes
text: "{{samples}}"
config: {REPOSITORY}/benchmarks/experiments/base/sparsity.yaml
overrides: {{training: {{steps: 2, seq_len: 21, global_batch_size: 6, micro_batch_size: 6, eval_every: 1,
  eval_samples: 18}}, checkpoint: {{every: 1, keep_every: 1}}, data.num_workers: 0}}
data: {{source: "sparsity:p=0.5,train=36,validation=18,length=20", tokenizer: words, out: data/sparsity}}
presets: [gmm_rks, gmm_prf]
tasks: {{vote: "lm:draws=3"}}
columns:
  model: name
  accuracy: {{measure: task, of: vote, value_of: vote.accuracy, format: .3f}}
  inconsistency: {{measure: task, of: vote, value_of: vote.inconsistency, format: .3f}}
  draws: {{measure: task, of: vote, value_of: draws}}
  memory: memory
  TFLOPs: {{measure: flops_to_loss, baseline: gmm_rks, format: .6f}}
correlations: [[accuracy, memory]]
scatter: {{x: accuracy, y: memory, size: inconsistency}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return tmp_path


def test_a_study_is_prepared_trained_evaluated_and_written_and_continues(folder):
    (folder / "small.yaml").write_text(f"{STUDY}presets: [flurka]\n{COLUMNS}")
    command = ["small.yaml", "--out", "page.md"]
    assert main(command) == 0
    lines = (folder / "page.md").read_text().splitlines()
    assert lines[0] == "# A small study"
    assert "python -m benchmarks.experiments small.yaml --out page.md`" in lines[2]
    assert lines[4] == "3 steps of 4 sequences."
    [row] = [line for line in lines if line.startswith("| `flurka`")]
    assert re.fullmatch(r"\| `flurka` \| \d\.\d{3}, \d\.\d{3} \| \*\*[\d.]+%\*\* \| [\d,]+ \|", row)
    assert (folder / "page.csv").read_text().startswith("variant,model,seed,step,value\n,flurka,0,0,")
    run = folder / "runs" / "small" / "flurka-0"
    first = (run / "metrics.jsonl").stat()
    assert main(command) == 0  # only reads what is there
    assert (run / "metrics.jsonl").stat() == first
    assert (folder / "page.md").read_text().splitlines()[4:] == lines[4:]


def test_a_study_of_an_up_training_has_rows_of_its_report(folder):
    keys = "{model.attention: flurka, uptrain: {}, data.isolate_documents: false}"
    (folder / "small.yaml").write_text(f"{STUDY}models: {{flurka: {keys}}}\n{UPTRAINED}")
    assert main(["small.yaml", "--out", "page.md"]) == 0
    rows = [line for line in (folder / "page.md").read_text().splitlines() if line.startswith("| ")][1:]
    number, share = r"\d\.\d{3}", r"[\d.]+%"
    for row, pattern in zip(
        rows,
        (
            rf"\| dense \| {number} \| 256 \| {share} \|",
            rf"\| flurka: swapped, untrained \| {number} \| 0 \|  \|",
            rf"\| flurka: distillation \| {number} \| 384 \| {share} \|",
        ),
        strict=True,
    ):
        assert re.fullmatch(pattern, row)
    assert (folder / "runs" / "small" / "hf").is_dir()


def test_a_study_of_votes_has_their_scores_correlations_and_plot_and_checkpoints_by_accuracy(folder, capfd):
    (folder / "votes.yaml").write_text(VOTES)
    assert main(["votes.yaml", "--out", "page.md"]) == 0
    lines = (folder / "page.md").read_text().splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| `")]
    assert [row[3].strip() for row in rows] == ["3"] * 2
    assert all(0 <= float(row[1]) <= 1 and 0 <= float(row[2]) < 100 for row in rows)
    assert float(rows[0][5]) >= 0
    assert any(line.startswith("* R² of *accuracy* and *memory* over 2 runs: none") for line in lines)
    assert (folder / "page_scatter.png").stat().st_size > 1000
    run = ["runs/votes/gmm_prf-0", "--what", "gradients", "--draws", "2"]
    assert launch(["analyze", *run, "--at-accuracy", "0", "--out", "gradients"]) == 0
    assert "accuracy 0: step 1" in capfd.readouterr().out
    assert (folder / "gradients" / "step_1" / "gradients.csv").is_file()


def test_a_study_that_is_ended_ends_its_run_which_has_saved(folder):
    study = STUDY.replace('"{examples}"', '"40"').replace("data/{examples}", "data/few")
    study = study.replace("training.steps: 3", "training.steps: 10000").replace(
        "eval_every: 3", "eval_every: 5000"
    )
    (folder / "small.yaml").write_text(f"{study}presets: [softmax, linear]\n{COLUMNS}")
    command = [sys.executable, "-m", "benchmarks.experiments", "small.yaml"]
    run = folder / "runs" / "small" / "softmax-0"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 120
        while not (file := run / "metrics.jsonl").exists() or "train/loss" not in file.read_text():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert find_checkpoint(run), "the run has saved"
    assert not (folder / "runs" / "small" / "linear-0").exists(), "the next model has not begun"
    RunLock(run)  # raises InUse if a process still trains

"""lm-evaluation-harness on one model: in process, on its folder, and as a client of its server."""

import json
import os
import subprocess
import sys

import pytest

from data_pipeline.tokenizers import BPE_EOD, byte_level
from launch.cli import main
from launch.exit_status import ExitStatus
from megakernel.checkpoint.opened import find_model
from tests.e2e.test_use_a_folder import save_llama
from tests.serving import NAME, served

QUESTIONS = [
    {
        "question": f"{first} + {second} =",
        "choices": ["one", "two or so", "é"],
        "answer": (first + second) % 3,
    }
    for first in range(4)
    for second in range(3)
]
TASKS = {
    "sums": """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""",
    "texts": """
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: bits_per_byte}}]
""",
    "written": """
task: written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 5}}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
metric_list: [{{metric: exact_match}}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of random weights, whose documents do not begin with BOS."""
    return save_llama(tmp_path_factory.mktemp("models") / "bytes", 257, byte_level(256, BPE_EOD), 256)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of tasks with local data."""
    place = tmp_path_factory.mktemp("tasks")
    data = place / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, text in TASKS.items():
        (place / f"{name}.yaml").write_text(text.format(data=data))
    group = "group: both\ntask: [sums, texts]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    (place / "both.yaml").write_text(group)
    return place


@pytest.fixture(autouse=True)
def offline(tmp_path_factory, monkeypatch):
    """No hub, and a cache of data sets of its own."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv(
        "LOCAL_RANK", raising=False
    )  # of a training run, which `accelerate` would take for a launcher's


def evaluated(folder, tasks, capsys, *specs):
    """The printed JSON of tasks by spec."""
    capsys.readouterr()
    words = [word for spec in specs for word in ("--task", f"lm_eval:{spec}")]
    assert main(["evaluate", str(folder), *words, "--include-path", str(tasks), "--json"]) == ExitStatus.DONE
    return dict(zip(specs, json.loads(capsys.readouterr().out), strict=True))


def scores(result):
    return {(score["task"], score["metric"]): score["value"] for score in result["scores"]}


def by_the_harness(folder, tasks, output, name, *model, environment=()):
    """Scores by the harness's own command."""
    arguments = ["--tasks", name, "--include_path", tasks, "--output_path", output]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", *model, *map(str, arguments)],
        env={**os.environ, **dict(environment), "HF_HOME": str(output / "home"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = output.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    return {
        (task, key.partition(",")[0]): value
        for task, values in results.items()
        for key, value in values.items()
        if "," in key and "_stderr" not in key
    }


def test_a_task_is_measured_in_process_and_shown_as_a_table(folder, tasks, capsys):
    words = ["evaluate", str(folder), "--include-path", str(tasks), "--samples", "4"]
    assert main([*words, "--task", "lm_eval:sums,fewshot=1"]) == ExitStatus.DONE
    shown = capsys.readouterr().out
    assert f"lm_eval:sums,fewshot=1: {folder} at step 0, lm-evaluation-harness " in shown
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    assert [(row[0], row[1], row[4], row[5]) for row in rows] == [
        ("sums", "acc", "4", "1"),
        ("sums", "acc_norm", "4", "1"),
    ]


@pytest.mark.second
def test_scores_in_process_are_those_of_the_harness_on_the_folder(folder, tasks, capsys, tmp_path):
    found = evaluated(folder, tasks, capsys, "sums", "written")
    arguments = f"--model hf --model_args pretrained={folder} --device cpu --batch_size 3".split()
    expected = by_the_harness(folder, tasks, tmp_path, ",".join(found), *arguments)
    assert len(expected) == 3
    assert scores(found["sums"]) | scores(found["written"]) == pytest.approx(expected, rel=1e-4)


def test_groups_and_whole_texts_have_their_metrics(folder, tasks, capsys):
    found = evaluated(folder, tasks, capsys, "both", "texts")
    assert {("both", "acc"), ("sums", "acc"), ("texts", "bits_per_byte")} <= scores(found["both"]).keys()
    assert (
        scores(found["texts"])["texts", "bits_per_byte"]
        == scores(found["both"])["texts", "bits_per_byte"]
        > 1
    )
    assert found["both"]["documents"] == {"sums": len(QUESTIONS), "texts": len(QUESTIONS)}


@pytest.mark.second
@pytest.mark.parametrize(
    ("spec", "message"),
    [("sumz", "the harness has no task sumz; choose "), ("hellaswag", "Rowan/hellaswag is not in ")],
)
def test_what_cannot_be_measured_is_refused_in_one_line(spec, message, folder, tasks, capsys):
    command = ["evaluate", str(folder), "--task", f"lm_eval:{spec}", "--include-path", str(tasks)]
    assert main(command) == ExitStatus.USAGE
    error = capsys.readouterr().err
    assert message in error
    (line,) = (line for line in error.splitlines() if line.startswith("megakernel: error: "))
    assert line.startswith(f"megakernel: error: --task lm_eval:{spec}: ")


def test_data_that_is_not_there_is_refused_in_one_line(folder, tmp_path, capsys):
    (tmp_path / "lost.yaml").write_text(
        TASKS["sums"].format(data=tmp_path / "none.jsonl").replace("sums", "lost")
    )
    command = ["evaluate", str(folder), "--task", "lm_eval:lost", "--include-path", str(tmp_path)]
    assert main(command) == ExitStatus.USAGE
    (line,) = (
        line for line in capsys.readouterr().err.splitlines() if line.startswith("megakernel: error: ")
    )
    assert "--task lm_eval:lost: its data cannot be loaded (FileNotFoundError" in line


@pytest.mark.second
def test_the_harness_asks_a_server_and_finds_the_same_scores(folder, tasks, capsys, tmp_path):
    found = evaluated(folder, tasks, capsys, "sums", "written")
    with served(find_model(folder)) as server:
        where = f"base_url={server.url}/v1/completions,model={NAME},tokenizer={folder},tokenizer_backend=huggingface"
        client = ["--model", "local-completions", "--model_args", where, "--batch_size", "4"]
        direct = {"NO_PROXY": "127.0.0.1"}.items()
        expected = by_the_harness(folder, tasks, tmp_path, ",".join(found), *client, environment=direct)
    assert len(expected) == 3
    assert scores(found["sums"]) | scores(found["written"]) == pytest.approx(expected, rel=1e-4)

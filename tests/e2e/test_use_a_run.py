"""Evaluation and generation with a trained run, whatever layout trained it."""

import io
import json
import shutil
import subprocess
import sys

import pytest

from launch.cli import main
from launch.exit_status import ExitStatus
from megakernel.evaluation import evaluate_run
from megakernel.generation import Sampling, generate_texts
from tests.disk import files_of_at_most
from tests.distributed.training_run import layout, metrics, train
from tests.tiers import tiered

SEQ_LEN = 128
OPTIONS = (
    *("training.steps=4", "training.micro_batch_size=4", "training.eval_every=2"),
    *("checkpoint.every=2", "logging.tensorboard=false"),
)


@pytest.fixture(scope="module")
def run(config):
    train(config, 1, *OPTIONS, "run.name=one")
    return config.parent / "one"


def eval_loss(run, step):
    (loss,) = (line["eval/loss"] for line in metrics(run) if line["step"] == step and "eval/loss" in line)
    return loss


@pytest.mark.parametrize("step", [2, 4])
def test_an_evaluation_equals_the_one_that_training_logged(run, step):
    result = evaluate_run(run, step=step)
    # The same samples and weights; float32 losses are summed in another order.
    assert result.loss == pytest.approx(eval_loss(run, step), rel=1e-6)
    assert (result.step, result.samples, result.seq_len) == (step, 6, SEQ_LEN)
    assert result.tokens == sum(bucket.tokens for bucket in result.by_position) <= 6 * SEQ_LEN


@pytest.mark.parametrize(
    "ranks", tiered(["tp2 pp2 zero 1", "cp2 zero 3", "one process zero 1 bfloat16"], ["tp2 pp2 zero 1"])
)
def test_one_process_evaluates_runs_of_any_layout(config, ranks):
    run = config.parent / ranks.replace(" ", "_")
    train(config, *layout(ranks), *OPTIONS, f"run.name={run.name}")
    # Sharded layers sum float32 numbers in another order; a bfloat16 run is evaluated in bfloat16.
    assert evaluate_run(run).loss == pytest.approx(eval_loss(run, 4), rel=1e-6)


def test_evaluation_samples_may_be_longer_and_more_than_in_training(run):
    result = evaluate_run(run, samples=8, seq_len=4 * SEQ_LEN)
    assert (result.samples, result.seq_len) == (8, 4 * SEQ_LEN)
    assert result.by_position[-1].last == 4 * SEQ_LEN - 1


def test_with_json_only_json_is_on_stdout(run):
    command = [sys.executable, "-m", "launch.cli", "evaluate", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == evaluate_run(run).as_dict()


def test_a_result_that_cannot_be_recorded_is_printed(run, tmp_path, capsys):
    folder = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))
    (folder / "evaluation").write_text("no folder")
    assert main(["evaluate", str(folder), "--json"]) != 0
    out, err = capsys.readouterr()
    assert json.loads(out) == evaluate_run(run).as_dict() | {"run": str(folder)}
    assert err.splitlines()[-1].startswith("megakernel: error: ")


def test_a_broken_newest_checkpoint_is_skipped_with_a_warning(run, tmp_path, caplog):
    damaged = shutil.copytree(run, tmp_path / "damaged")
    weights = damaged / "checkpoints/step_4/mp_rank_00_model_states.pt"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert evaluate_run(damaged).loss == evaluate_run(run, step=2).loss
    assert "step_4 cannot be used" in caplog.text


def test_several_tasks_are_evaluated_at_once_and_saved_in_the_run(run, tmp_path, capsys):
    folder = shutil.copytree(run, tmp_path / "run")
    specs = {
        "lm:far=shuffled,near=16": "lm-far-shuffled-near-16",
        "lm:stride=32": "lm-stride-32",
        "lm:repeated=text": "lm-repeated-text",
        "lm:repeated=random": "lm-repeated-random",
        "passkey:length=192+256,depths=2,filler=validation": "passkey-length-192-256-depths-2-filler-validation",
        "mqar:length=64": "mqar-length-64",
    }
    options = [item for spec in specs for item in ("--task", spec)]
    assert main(["evaluate", str(folder), "--step", "2", "--samples", "4", "--json", *options]) == 0
    far, sliding, repeated, random, passkey, mqar = printed = json.loads(capsys.readouterr().out)
    assert [bucket["first"] for bucket in far["buckets"]] == [32, 64]
    assert far["samples"] == sliding["samples"] == 4
    assert sliding["tokens"] == SEQ_LEN + 3 * 32
    assert repeated["span"] == random["span"] == SEQ_LEN // 2
    # Held-out text is more likely than random ids.
    assert repeated["first_loss"] < random["first_loss"]
    assert [(cell["length"], cell["depth"], cell["answers"]) for cell in passkey["cells"]] == [
        (length, depth, 2) for length in (192, 256) for depth in (0.0, 1.0)
    ]
    assert (mqar["examples"], mqar["answers"]) == (4, 32)
    assert all(result["step"] == 2 for result in printed)
    saved = folder / "evaluation" / "step_2"
    assert {file.stem for file in saved.glob("*.json")} == {f"{name}-samples-4" for name in specs.values()}
    recorded = json.loads((saved / "mqar-length-64-samples-4.json").read_text())
    assert (recorded["task"], recorded["accuracy"]) == ("mqar:length=64,samples=4", mqar["accuracy"])
    assert main(["evaluate", str(folder), "--task", "mqar:length=64,samples=4"]) == 0
    assert "of the answers are right" in capsys.readouterr().out


def test_options_beside_a_task_do_not_replace_its_result(run, tmp_path, capsys):
    folder = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))
    saved = folder / "evaluation" / "step_4"
    usual = evaluate_run(run)
    as_usual = ["--samples", str(usual.samples), "--seq-len", str(usual.seq_len)]
    for options in (
        as_usual,
        ["--seq-len", "64"],
        ["--samples", "3", "--seq-len", "64", "--task", "lm:stride=32"],
    ):
        assert main(["evaluate", str(folder), *options]) == 0
    tasks = {file.name: json.loads(file.read_text())["task"] for file in saved.glob("*.json")}
    assert tasks == {
        "lm.json": "lm",
        "lm-seq_len-64.json": "lm:seq_len=64",
        "lm-stride-32-samples-3-seq_len-64.json": "lm:stride=32,samples=3,seq_len=64",
    }
    assert json.loads((saved / "lm.json").read_text())["loss"] == usual.loss
    capsys.readouterr()
    other = shutil.copytree(folder, tmp_path / "other")
    assert main(["compare", str(folder), str(other)]) == 0
    assert "  lm:seq_len=64\n" in capsys.readouterr().out


def test_results_on_other_data_do_not_replace_those_on_the_runs_own(run, tmp_path, capsys):
    folder, other = shutil.copytree(run, tmp_path / "run"), tmp_path / "other"
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{n} other text"}}\n' * 40 for n in range(40)))
    command = f"prepare --source {tmp_path}/text.jsonl --tokenizer byte --out {other} --workers 1"
    assert main(command.split()) == 0
    losses = []
    for data in ((), ("--data", str(other))):
        assert main(["evaluate", str(folder), "--json", *data]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    recorded = json.loads((folder / "evaluation" / "step_4" / "lm.json").read_text())["loss"]
    assert recorded == losses[0] != losses[1]


@pytest.fixture(scope="module")
def recall(config, tmp_path_factory):
    """A run trained on the answers only, by two context-parallel ranks."""
    data = tmp_path_factory.mktemp("recall") / "mqar"
    command = f"prepare --source task:mqar:length={SEQ_LEN} --max-documents 300 --tokenizer byte --out {data}"
    assert main([*command.split(), "--validation-fraction", "0.2", "--workers", "1"]) == 0
    layout = ("parallel.context=2", f"data.train={data}", "data.scored=answers")
    train(config, 2, *OPTIONS, "run.name=recall", *layout)
    return config.parent / "recall"


def test_only_answers_count_in_training_and_evaluation_on_any_layout(recall):
    result = evaluate_run(recall)
    assert result.tokens == 6 * 8, "a sequence is an example of eight answers"
    assert result.loss == pytest.approx(eval_loss(recall, 4), rel=1e-6)
    assert result.bits_per_byte is None
    assert not any("bits_per_byte" in tag for line in metrics(recall) for tag in line)


def generated_text(run, prompt="import", seed=0, temperature=1.0, count=30):
    sampling = Sampling(temperature)
    pieces = generate_texts(run, [prompt], max_new_tokens=count, sampling=sampling, seed=seed)
    return "".join(piece.text for piece in pieces)


def test_a_seed_determines_the_text(run):
    assert generated_text(run, seed=1) == generated_text(run, seed=1) != generated_text(run, seed=2)


def test_greedy_text_does_not_depend_on_the_seed(run):
    assert generated_text(run, temperature=0, seed=1) == generated_text(run, temperature=0, seed=2)


def test_an_empty_prompt_starts_a_document(run):
    assert generated_text(run, prompt="") != ""


def test_generate_continues_each_of_several_prompts(run, capsys):
    command = ["generate", str(run), "--prompt", "import", "--prompt", "def", "--max-new-tokens", "30"]
    assert main([*command, "--temperature", "0"]) == 0
    first, second = (generated_text(run, prompt, temperature=0) for prompt in ("import", "def"))
    assert capsys.readouterr().out == f"=== prompt 1\nimport{first}\n=== prompt 2\ndef{second}\n"


def test_generate_prints_the_prompt_and_its_continuation(run, capsys):
    command = ["generate", str(run), "--prompt", "import é", "--max-new-tokens", "30", "--temperature", "1"]
    assert main(command) == 0
    assert capsys.readouterr().out == f"import é{generated_text(run, 'import é')}\n"


def test_prompts_come_from_a_file_stdin_or_json_lines(run, tmp_path, capsys, monkeypatch):
    options = ["--max-new-tokens", "12", "--temperature", "1"]
    expected = generated_text(run, long := "import é\r\n" * 100, count=12)
    (tmp_path / "prompt.txt").write_bytes(long.encode())
    for name in (str(tmp_path / "prompt.txt"), "-"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(long.encode())))
        assert main(["generate", str(run), "--prompt-file", name, *options]) == 0
        assert capsys.readouterr().out == f"{expected}\n"
    rows = [{"prompt": "import é", "id": 7}, {"prompt": ""}, {"prompt": long}]
    continued = [{**row, "continuation": generated_text(run, row["prompt"], count=12)} for row in rows]
    for encoding in ("utf-8", "utf-8-sig"):
        text = "\n\n".join(map(json.dumps, rows)) + "\n"
        (tmp_path / "prompts.jsonl").write_text(text, encoding=encoding)
        assert main(["generate", str(run), "--prompts", str(tmp_path / "prompts.jsonl"), *options]) == 0
        assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == continued


@pytest.fixture(scope="module")
def noisy(config):
    kernels = (
        "model.attention_pattern=[gmm_prf, {preset: flurka, feature_map: {name: gmm_rks, smoothing: 1.0}}]"
    )
    train(config, 1, *OPTIONS, "run.name=noisy", "model.num_layers=2", kernels)
    return config.parent / "noisy"


@pytest.mark.second
def test_an_evaluation_averages_over_draws_of_the_noise_deterministically(noisy, capsys):
    fixed, one, many = (evaluate_run(noisy, draws=draws) for draws in (None, 1, 8))
    assert fixed.loss == pytest.approx(eval_loss(noisy, 4), rel=1e-6)
    assert len({fixed.loss, one.loss, many.loss}) == 3
    assert (fixed.draws, many.draws) == (None, 8)
    assert evaluate_run(noisy, draws=8) == many
    assert main(["evaluate", str(noisy), "--draws", "8"]) == 0
    printed = capsys.readouterr().out
    assert "probabilities are means over 8 draws of the layers' noise" in printed
    assert f"{many.loss:.4f}" in printed


@pytest.fixture
def orphan(run, corpus, tmp_path):
    """A run whose corpus no longer exists."""
    folder = shutil.copytree(run, tmp_path / "orphan")
    recorded = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(recorded.replace(str(corpus), str(tmp_path / "gone")))
    return folder


def test_a_run_without_its_corpus_still_generates(run, orphan):
    assert generated_text(orphan) == generated_text(run)


@pytest.fixture(scope="module")
def learned(config):
    train(config, 1, *OPTIONS, "run.name=learned", "training.steps=2", "model.position=learned")
    return config.parent / "learned"


@pytest.mark.second
def test_all_learned_positions_can_be_used(learned):
    whole = generated_text(learned, prompt="x", temperature=0, count=SEQ_LEN)
    assert whole.startswith(generated_text(learned, prompt="x", temperature=0, count=SEQ_LEN - 1))


@pytest.fixture
def untrained(run, tmp_path):
    folder = tmp_path / "untrained"
    folder.mkdir()
    shutil.copy(run / "config.yaml", folder)
    return folder


GENERATE = ("generate", "--prompt", "x")
EVALUATE = ("evaluate",)
TASK = ("evaluate", "--task")


@pytest.mark.parametrize(
    ("folder", "command", "explanation"),
    [
        ("nowhere", EVALUATE, "is not the folder of a run"),
        ("nowhere", GENERATE, "is not the folder of a run"),
        ("untrained", EVALUATE, "has no checkpoint"),
        ("run", (*EVALUATE, "--step", "3"), "choose one of 2, 4"),
        ("run", (*GENERATE, "--step", "3"), "choose one of 2, 4"),
        ("run", ("generate", "--prompt", "a\udcff"), "prompt is not valid UTF-8 at character 2; write"),
        ("run", (*EVALUATE, "--samples", "0"), "give --samples 1 or more"),
        ("run", (*EVALUATE, "--seq-len", "0"), "give --seq-len 1 or more"),
        ("run", (*EVALUATE, "--seq-len", "100000000"), "validation tokens; give at most"),
        ("run", (*TASK, "lm:stride=200"), "stride=200 would leave tokens out between windows of 128"),
        ("run", (*TASK, "lm:far=shuffled,near=64"), "near=64 leaves no far context in sequences of 128"),
        ("run", (*TASK, "lm:near=64"), "near=64 has no effect alone; add far=shuffled"),
        (
            "run",
            (*TASK, "lm:repeated=text,far=shuffled"),
            "far=shuffled cannot be combined with repeated=text; leave out one of them",
        ),
        (
            "run",
            (*TASK, "lm:repeated=random,seq_len=32"),
            "half of 32 tokens is too short to be repeated; give a seq_len of at least 64",
        ),
        ("run", (*TASK, "mqar", "--baseline", "bigbird"), "leave out --task or --baseline"),
        ("run", (*EVALUATE, "--step", "2", "--baseline", "bigbird"), "leave out --step or --baseline"),
        (
            "run",
            (*EVALUATE, "--baseline-weights", "w"),
            "--baseline-weights w has no effect alone; add --baseline",
        ),
        ("learned", (*TASK, "mqar:length=256"), f"{SEQ_LEN} positions that the model has weights for"),
        ("run", (*GENERATE, "--max-new-tokens", "0"), "give 1 or more"),
        ("run", (*GENERATE, "--top-p", "2"), "top_p=2.0 is out of range"),
        (
            "run",
            (*EVALUATE, "--draws", "4"),
            "has noise that training redraws, so all draws would be the same",
        ),
        ("noisy", (*EVALUATE, "--draws", "0"), "give --draws 1 or more"),
        ("noisy", (*EVALUATE, "--draws", "2", "--baseline", "bigbird"), "leave out --draws or --baseline"),
        ("orphan", EVALUATE, "make it with `megakernel prepare --source FOLDER --tokenizer byte --out"),
        ("learned", (*EVALUATE, "--seq-len", str(SEQ_LEN + 1)), f"give at most {SEQ_LEN}"),
        ("learned", (*GENERATE, "--max-new-tokens", str(SEQ_LEN + 1)), f"give at most {SEQ_LEN}"),
    ],
)
@pytest.mark.usefixtures("run")  # what training prints is no output of the command
def test_invalid_options_are_refused_in_one_line_with_the_remedy(
    folder, command, explanation, request, tmp_path, refused
):
    path = tmp_path / folder if folder == "nowhere" else request.getfixturevalue(folder)
    name, *options = command
    assert explanation in refused(name, path, *options)


def test_an_export_to_a_full_disk_is_a_one_line_error_and_leaves_no_files(run, tmp_path, capsys):
    with files_of_at_most(20_000):
        assert main(["export", str(run), "--to", str(tmp_path / "model")]) == ExitStatus.USAGE
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith(f"megakernel: error: --to {tmp_path / 'model'} cannot be written (")
    assert list(tmp_path.iterdir()) == []


RUN_COMMANDS = """
import sys
from launch.cli import main
for command in sys.argv[1:]:
    status = main(command.split())
    heavy = sorted({"torch._dynamo", "torch._inductor", "deepspeed", "megatron"} & sys.modules.keys())
    print("*", command.split()[0], status, *heavy, flush=True)
"""


@pytest.mark.second
def test_commands_that_do_not_train_import_no_training_library(run, config, tmp_path):
    commands = {
        "generate": f"generate {run} --prompt x --max-new-tokens 1",
        "evaluate": f"evaluate {run}",
        "export": f"export {run} --to {tmp_path / 'out'}",
        "reshape": f"reshape {run}",
        "pretrain": f"pretrain {config} run.name=one {' '.join(OPTIONS)}",
        "analyze": f"analyze {run} --what attention",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN_COMMANDS, *commands.values()],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("* ")]
    assert lines == [f"* {name} 0" for name in commands]
    assert "is done: 4 of 4 steps" in done.stdout

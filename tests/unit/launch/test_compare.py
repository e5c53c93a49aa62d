"""`megakernel compare` on run folders whose losses are known functions of tokens and time."""

import json
from pathlib import Path

import pytest

from launch.cli import main
from megakernel.analysis.comparison import ComparedRun, RunComparison
from megakernel.config import UserError, to_yaml
from tests.unit.config.trees import config

TOKENS = 64 * 8
"""Of a step, unless a run has another batch."""


def loss(tokens: float, above: float = 0.0) -> float:
    return 5.0 + above - tokens / 10_000


def make(
    root: Path, name: str, steps=40, batch=8, step_time=0.5, above=0.0, metrics=True, lr=1e-3, bits=False
) -> Path:
    """A run that logs every second step and evaluates every tenth; steps of the first ten take twice as long."""
    run = root / name
    (run / "checkpoints").mkdir(parents=True)
    training = {"steps": steps, "seq_len": 64, "global_batch_size": batch}
    tree = config(training=training, optimizer={"lr": lr}, run={"name": name, "root": str(root)})
    (run / "config.yaml").write_text(to_yaml(tree))
    lines = []
    for step in range(steps + 1):
        line = {"step": step}
        tokens = step * 64 * batch
        if step % 10 == 0:
            line |= {"eval/loss": loss(tokens, above)} | ({"eval/bits_per_byte": 1 + above} if bits else {})
        if step and step % 2 == 0:
            line |= {"train/loss": loss(tokens, above) + 1, "train/tokens": tokens}
            line |= {"throughput/step_time": step_time * (2 if step <= 10 else 1)}
        if len(line) > 1:
            lines.append(json.dumps(line) + "\n")
    if metrics:
        (run / "metrics.jsonl").write_text("".join(lines))
    return run


def evaluated(run: Path, step: int, task: str, **scalars: float) -> None:
    folder = run / "evaluation" / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{task}.json").write_text(json.dumps({"task": task, "scalars": scalars}))


def compared(root: Path, capsys, *runs: str) -> dict:
    assert main(["compare", *runs, "--root", str(root), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_losses_are_compared_at_equal_tokens_up_to_the_end_of_the_shortest(tmp_path, capsys):
    make(tmp_path, "long", steps=40)
    make(tmp_path, "wide", steps=10, batch=16, above=1.0)
    found = compared(tmp_path, capsys, "long", "wide")
    assert [run["tokens"] for run in found["runs"]] == [40 * TOKENS, 10 * 2 * TOKENS]
    shortest = 10 * 2 * TOKENS
    assert [row["tokens"] for row in found["at_equal_tokens"]] == [
        share * shortest for share in (0.25, 0.5, 0.75, 1)
    ]
    for row in found["at_equal_tokens"]:
        long, wide = row["runs"]
        # Evaluations lie on a line, and so does what is between them.
        assert long["eval/loss"] == pytest.approx(loss(row["tokens"]))
        assert wide["eval/loss"] == pytest.approx(loss(row["tokens"], 1.0))
    # The long run logs every 1,024 tokens, the last tenth of 10,240 ends at 10,240: one loss; the other run's, too.
    long, wide = found["at_equal_tokens"][-1]["runs"]
    assert long["train/loss"] == pytest.approx(loss(shortest) + 1)
    assert wide["train/loss"] == pytest.approx(loss(shortest, 1.0) + 1)


def test_a_training_loss_is_the_mean_of_the_window_before(tmp_path):
    run = ComparedRun.read(make(tmp_path, "first"))
    # Logged at 18 and 20 steps; 16 is where the window begins, and not in it.
    expected = (loss(18 * TOKENS) + loss(20 * TOKENS)) / 2 + 1
    assert run.at("train/loss", "tokens", 20 * TOKENS, 4 * TOKENS) == pytest.approx(expected)
    # Nothing was logged in the window: between the neighbours.
    assert run.at("train/loss", "tokens", 19 * TOKENS, 0.1) == pytest.approx(loss(19 * TOKENS) + 1)
    assert run.at("train/loss", "tokens", 1 * TOKENS, 0.1) is None
    assert run.at("eval/loss", "tokens", 41 * TOKENS, 0.1) is None


def test_losses_are_compared_at_equal_time_of_training_steps(tmp_path, capsys):
    make(tmp_path, "fast", step_time=0.5)  # 10 steps of 1 s, 30 of 0.5 s
    make(tmp_path, "slow", step_time=1.0)  # 10 steps of 2 s, 30 of 1 s
    found = compared(tmp_path, capsys, "fast", "slow")
    assert [run["seconds"] for run in found["runs"]] == [25.0, 50.0]
    assert [row["seconds"] for row in found["at_equal_seconds"]] == [6.25, 12.5, 18.75, 25.0]
    fast, slow = found["at_equal_seconds"][-1]["runs"]
    assert fast["eval/loss"] == pytest.approx(loss(40 * TOKENS))
    # 25 s are 10 slow steps and 5 others.
    assert slow["eval/loss"] == pytest.approx(loss(15 * TOKENS))


def test_keys_that_differ_are_listed_with_their_values(tmp_path, capsys):
    make(tmp_path, "a")
    make(tmp_path, "b", lr=2e-3, steps=20)
    assert compared(tmp_path, capsys, "a", "b")["keys"] == {
        "training.steps": [40, 20],
        "optimizer.lr": [0.001, 0.002],
    }
    assert main(["compare", "a", "b", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "  optimizer.lr  A 0.001  B 0.002\n" in out
    make(tmp_path, "c")
    assert main(["compare", "a", "c", "--root", str(tmp_path)]) == 0
    assert "\nno key differs\n" in capsys.readouterr().out


def test_evaluations_stand_side_by_side_with_their_steps(tmp_path, capsys):
    first, second = make(tmp_path, "first"), make(tmp_path, "second")
    evaluated(first, 20, "passkey", accuracy=0.25)
    evaluated(first, 40, "passkey", accuracy=0.5, loss=1.0)
    evaluated(second, 30, "passkey", accuracy=0.75)
    evaluated(second, 30, "lm", loss=2.0)
    found = compared(tmp_path, capsys, "first", "second")["evaluations"]
    assert found == {
        "passkey": [{"step": 40, "accuracy": 0.5, "loss": 1.0}, {"step": 30, "accuracy": 0.75}],
        "lm": [None, {"step": 30, "loss": 2.0}],
    }
    assert main(["compare", "first", "second", "--root", str(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "A step 40 B step 30" in lines
    assert "accuracy A 0.5000 B 0.7500" in lines
    assert "loss A 1.0000 B -" in lines


def test_the_picture_has_titles_and_a_legend_and_its_path_is_printed(tmp_path, capsys):
    runs = [make(tmp_path, name) for name in ("first", "second")]
    assert main(["compare", "first", "second", "--root", str(tmp_path)]) == 0
    file = tmp_path / "first/comparison/second.png"
    assert f"\npicture: {file}\n" in capsys.readouterr().out
    assert file.read_bytes().startswith(b"\x89PNG")
    assert main(["compare", *map(str, runs), "--out", str(tmp_path / "x/y.png")]) == 0
    assert (tmp_path / "x/y.png").exists()
    capsys.readouterr()
    assert main(["compare", *map(str, runs), "--json", "--out", str(tmp_path / "z.png")]) == 0
    assert json.loads(capsys.readouterr().out)["picture"] == str(tmp_path / "z.png")
    assert (tmp_path / "z.png").exists()
    figure = RunComparison([ComparedRun.read(run) for run in runs]).figure(["first", "second"])
    by_tokens, by_time = figure.axes
    assert [axes.get_title() for axes in figure.axes] == [
        "loss over tokens read",
        "loss over time of training steps",
    ]
    assert [text.get_text() for text in by_tokens.get_legend().get_texts()] == [
        f"{name}, {kind}" for name in ("first", "second") for kind in ("train", "eval")
    ]
    assert by_time.lines[1].get_xdata()[-1] == 25.0


def test_without_matplotlib_only_the_picture_is_missing(tmp_path, capsys, monkeypatch):
    make(tmp_path, "a"), make(tmp_path, "b")
    monkeypatch.setattr("megakernel.config.extras.find_spec", lambda name: None)
    command = ["compare", "a", "b", "--root", str(tmp_path)]
    assert main(command) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line == "the picture is left out: it needs matplotlib; pip install 'megakernel[plot]'"
    assert main([*command, "--out", str(tmp_path / "x.png")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err


def test_runs_of_other_tokenizers_are_compared_by_bits_per_byte(tmp_path, capsys):
    for name, text in (("a", "one"), ("b", "two")):
        run = make(tmp_path, name, bits=True)
        (run / "tokenizer").mkdir()
        (run / "tokenizer" / "tokenizer.json").write_text(text)
    found = compared(tmp_path, capsys, "a", "b")
    assert found["one_tokenizer"] is False
    assert found["at_equal_tokens"][-1]["runs"] == [{"eval/bits_per_byte": 1.0}] * 2
    assert main(["compare", "a", "b", "--root", str(tmp_path)]) == 0
    assert "tokenizers differ, so losses per token do not compare" in " ".join(
        capsys.readouterr().out.split()
    )
    (tmp_path / "b/tokenizer/tokenizer.json").write_text("one")
    assert compared(tmp_path, capsys, "a", "b")["one_tokenizer"] is True


def test_a_run_that_has_logged_nothing_is_compared_by_its_keys(tmp_path, capsys):
    make(tmp_path, "a")
    make(tmp_path, "b", metrics=False, lr=3e-3)
    assert main(["compare", "a", "b", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "no losses at equal tokens: b has logged no step yet" in out
    assert "optimizer.lr" in out
    found = compared(tmp_path, capsys, "a", "b")
    assert (found["at_equal_tokens"], found["at_equal_seconds"]) == ([], [])


def test_a_line_that_is_being_written_is_left_out_and_a_loss_that_is_none(tmp_path, capsys):
    make(tmp_path, "a")
    file = make(tmp_path, "b") / "metrics.jsonl"
    text = file.read_text()
    file.write_text(text.replace('"eval/loss": 5.0,', '"eval/loss": null,') + '{"step": 42, "train/lo')
    found = compared(tmp_path, capsys, "a", "b")
    assert found["runs"][1]["step"] == 40
    assert found["at_equal_tokens"][-1]["runs"][1]["eval/loss"] == pytest.approx(loss(40 * TOKENS))


def test_an_up_training_means_its_stages(tmp_path, capsys):
    for name in ("1-transfer", "2-main"):
        make(tmp_path / "up", name)
    found = compared(tmp_path, capsys, "up")
    assert [run["run"] for run in found["runs"]] == [
        str(tmp_path / "up" / name) for name in ("1-transfer", "2-main")
    ]


def test_many_runs_with_long_names_and_values_fit_80_columns(tmp_path, capsys, monkeypatch):
    names = [f"pretrain-350m-flurka-with-a-long-name-{number}" for number in range(5)]
    for number, name in enumerate(names):
        evaluated(make(tmp_path, name, lr=1e-3 * (1 + number)), 40, "passkey", accuracy=number / 10)
    for width in (80, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["compare", *names, "--root", str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(len(line) for line in lines if not line.startswith(("picture", *"ABCDE"))) <= width
        assert "0.005" in " ".join(lines)


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        (["a"], 2, "a alone compares with nothing; name a second run"),
        (["a", "b", "./{root}/a"], 2, "a is given twice; give runs that differ"),
        (["a", "none"], 3, "none is no run; runs: "),
        (["a", "b", "--out", "x.pdf"], 2, "--out x.pdf is no PNG file"),
        (["a", "torn"], 2, "torn/metrics.jsonl is damaged"),
        (["a", "odd"], 2, "odd/metrics.jsonl is damaged"),
        (["a", "spoiled"], 2, "passkey.json is damaged"),
        (["a", "waiting"], 2, "waiting has no config.yaml: the run has not started yet; leave it out"),
    ],
)
def test_wrong_input_is_refused_in_one_line(tmp_path, capsys, monkeypatch, arguments, status, error):
    for name in ("a", "b", "torn", "odd", "spoiled", "waiting"):
        make(tmp_path, name)
    (tmp_path / "torn/metrics.jsonl").write_text('{"step": 1}\n\0\0\n')
    (tmp_path / "odd/metrics.jsonl").write_text('{"train/loss": 1}\n')
    evaluated(tmp_path / "spoiled", 1, "passkey")
    (tmp_path / "spoiled/evaluation/step_1/passkey.json").write_text("[]")
    (tmp_path / "waiting/config.yaml").unlink()
    (tmp_path / "waiting/run.json").write_text('{"jobs": []}')
    monkeypatch.chdir(tmp_path.parent)
    words = [text.format(root=tmp_path.name) for text in arguments]
    assert main(["compare", *words, "--root", str(tmp_path)]) == status
    [line] = capsys.readouterr().err.splitlines()
    assert error in line


def test_reading_a_folder_that_is_no_run_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        ComparedRun.read(tmp_path)

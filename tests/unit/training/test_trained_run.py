"""Finding a run and its checkpoint, and the errors for folders without one."""

from pathlib import Path

import pytest

from megakernel.checkpoint.manifest import SavedProgress, flushed, write_manifest
from megakernel.checkpoint.trained_run import finished_message, recorded_config, student_run
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import UserError, load
from tests.hostile import flip
from tests.unit.config import trees

STAGES = ("1-transfer", "2-base", "9-main", "10-length", "11-scratch")


@pytest.fixture
def uptraining(tmp_path):
    """The folder of an up-training whose fourth stage has not saved yet."""
    folder = tmp_path / "up"
    for stage in STAGES:
        (folder / stage / "checkpoints").mkdir(parents=True)
        if stage != "10-length":
            (folder / stage / "checkpoints" / "step_3").mkdir()
    (folder / "1-notes").mkdir()
    trees.file(folder, "config.yaml")
    return folder


@pytest.mark.parametrize(
    "command",
    ["evaluate RUN", "generate RUN --prompt x", "export RUN --to OUT", "export RUN --to OUT --step 3"],
)
def test_an_uptraining_names_its_stages_in_order(command, uptraining, tmp_path, refused):
    words = command.replace("RUN", str(uptraining)).replace("OUT", str(tmp_path / "out")).split()
    stages = ", ".join(str(uptraining / name) for name in ("1-transfer", "2-base", "9-main", "11-scratch"))
    error = refused(*words)
    assert f"has no checkpoint; it is an up-training: give the run of a stage, {stages}" in error
    with pytest.raises(UserError, match="it is an up-training: give the run of a stage, "):
        WeightSource.find("init.from", uptraining)


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        ({"1-transfer": 4, "2-base": 4, "9-main": 4, "11-scratch": 4}, "9-main"),
        ({"1-transfer": 4, "2-base": 4, "9-main": 3}, "2-base"),
        ({"1-transfer": 3}, None),
    ],
)
def test_the_student_is_the_last_stage_that_is_finished(steps, chosen, tmp_path):
    for stage, step in steps.items():
        checkpoint = tmp_path / stage / "checkpoints" / f"step_{step}"
        checkpoint.mkdir(parents=True)
        trees.file(tmp_path / stage, "config.yaml", training={"steps": 4})
        write_manifest(checkpoint, SavedProgress(step, step, step, {}, {}), {})
    assert student_run(tmp_path) == (tmp_path if chosen is None else tmp_path / chosen)
    assert student_run(tmp_path / "1-transfer") == tmp_path / "1-transfer"


def test_a_run_is_finished_if_its_last_checkpoint_is_intact(tmp_path):
    config = load(trees.file(tmp_path, "config.yaml", run={"root": str(tmp_path), "name": "run"}))
    checkpoint = config.run.folder / "checkpoints" / f"step_{config.training.steps}"
    assert finished_message(config) is None
    checkpoint.mkdir(parents=True)
    file = checkpoint / "weights.pt"
    file.write_bytes(bytes(range(256)))
    write_manifest(
        checkpoint, SavedProgress(config.training.steps, 1, 1, {}, {}), flushed(checkpoint, [file])
    )
    assert "is done" in finished_message(config)
    flip(file, 0.5)
    assert finished_message(config) is None


def test_a_recorded_configuration_that_is_no_text_is_refused_in_one_line(tmp_path):
    (tmp_path / "config.yaml").write_bytes(b"run: {name: \xff}")
    with pytest.raises(UserError, match=r"config\.yaml is not UTF-8 text"):
        recorded_config(tmp_path)


def test_a_run_without_a_checkpoint_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="let its run train on until it saves one"):
        WeightSource.find("init.from", Path(tmp_path))


@pytest.mark.parametrize("command", ["evaluate", "generate --prompt x", "export --to out", "reshape"])
@pytest.mark.parametrize("typed", ["up", "runs/up"])
def test_every_command_takes_the_name_of_a_run(command, typed, uptraining, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    uptraining.rename("runs/up")
    assert "error: runs/up has no checkpoint" in refused(*command.split(), typed)


def test_an_unknown_run_is_refused_with_similar_names(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(12):
        Path(f"runs/run-{number}").mkdir(parents=True)
        trees.file(Path(f"runs/run-{number}"), "config.yaml")
    for typed in ("run-", "runs/run-"):
        error = refused("generate", typed, "--prompt", "x")
        assert "runs/run- is not the folder of a run" in error
        assert "choose one of runs/run-0, runs/run-1, " in error
        assert "... (7 more)" in error


def test_relative_paths_of_a_run_are_resolved_from_where_it_was_started(tmp_path, monkeypatch):
    start = tmp_path / "start"
    run = start / "runs" / "small"
    run.mkdir(parents=True)
    trees.file(run, "config.yaml", init={"from": "models/dense"})
    monkeypatch.chdir(start)
    assert recorded_config(Path("runs/small")) == (as_written := load(run / "config.yaml"))
    monkeypatch.chdir(tmp_path)
    found = recorded_config(Path("start/runs/small"))
    assert [corpus.path for corpus in found.data.train] == [start / c.path for c in as_written.data.train]
    assert found.init.source == start / "models/dense"
    assert found.run == as_written.run
    run.rename(tmp_path / "elsewhere")
    assert recorded_config(tmp_path / "elsewhere") == as_written

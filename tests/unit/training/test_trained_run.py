"""What is said where a folder holds no checkpoint of its own."""

from pathlib import Path

import pytest

from launch.cli import main
from megakernel.config import UserError
from megakernel.training.weight_source import WeightSource
from tests.unit.config import trees

STAGES = ("1-transfer", "2-base", "9-main", "10-length", "11-scratch")


@pytest.fixture
def uptraining(tmp_path):
    """The folder of one whose fourth stage has not saved yet."""
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
def test_an_uptraining_names_its_stages_the_model_first(command, uptraining, tmp_path, capsys):
    words = command.replace("RUN", str(uptraining)).replace("OUT", str(tmp_path / "out")).split()
    assert main(words) == 2
    stages = ", ".join(str(uptraining / name) for name in ("9-main", "11-scratch", "2-base", "1-transfer"))
    said = capsys.readouterr().err
    assert f"has no checkpoint; it is an up-training: give the run of a stage, {stages}" in said
    assert said.count("\n") == 1
    with pytest.raises(UserError, match="it is an up-training: give the run of a stage, "):
        WeightSource.find("init.from", uptraining)


def test_a_run_that_has_not_saved_is_to_train_on(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="let its run train on until it saves one"):
        WeightSource.find("init.from", Path(tmp_path))

"""Runs and models from untrusted sources: no command executes code from their files, and damage is detected."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from launch.cli import main
from megakernel.checkpoint.manifest import SavedCheckpoint, flushed, write_manifest
from megakernel.config import UserError, load
from tests import dense_models
from tests.distributed.processes import cpu_mesh, run_ranks
from tests.distributed.training_run import train
from tests.hostile import flip, plant

OPTIONS = ("training.steps=4", "checkpoint.every=2", "training.eval_samples=2", "logging.tensorboard=false")
SMALL = ("model.num_layers=2", "model.hidden_size=32", "model.attention_pattern=[main, softmax]")
MODEL, OPTIMIZER = "*mp_rank_00_model_states.pt", "*zero_pp_rank_0_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module")
def run(config):
    train(config, 2, *OPTIONS, *SMALL, "parallel.zero_stage=1", "run.name=run")
    return config.parent / "run"


def copy_with_code(run: Path, to: Path, pattern: str) -> Path:
    """A copy of a run in which one file of each checkpoint contains code, with matching checksums."""
    copy = Path(shutil.copytree(run, to))
    for folder in copy.glob("checkpoints/step_*"):
        (file,) = folder.glob(pattern)
        plant(file, to.parent / "harm", **torch.load(file, weights_only=False))
        write_manifest(folder, SavedCheckpoint.read(run / "checkpoints" / folder.name).progress, {})
        files = flushed(folder, folder.glob("*.pt"))
        write_manifest(folder, SavedCheckpoint.read(folder).progress, files)
    return copy


def commands(run: Path, out: Path) -> list[list[str]]:
    return [
        ["generate", str(run), "--prompt", "x"],
        ["evaluate", str(run)],
        ["evaluate", str(run), "--step", "2"],
        ["analyze", str(run), "--what", "ranks"],
        ["export", str(run), "--to", str(out / "exported")],
        ["reshape", str(run)],
    ]


@pytest.mark.parametrize("pattern", [MODEL, OPTIMIZER])
def test_no_command_executes_code_in_a_runs_files(pattern, run, tmp_path, refused):
    foreign = copy_with_code(run, tmp_path / "foreign", pattern)
    for command in commands(foreign, tmp_path):
        assert "posix.mkdir, which is code" in refused(*command), command
        assert not (tmp_path / "harm").exists(), command


OTHER_LAYOUT = "parallel.zero_stage=0"
RESUME = ("parallel.zero_stage=1",)


def starting_steps(config: Path, cases: dict[str, tuple[Path, tuple[str, ...]]]) -> dict[str, int | str]:
    """Case -> the step from which training would continue, or why it is refused."""
    from launch.training import providers
    from megakernel.training.trainer import Trainer

    results: dict[str, int | str] = {}
    with cpu_mesh() as mesh:
        for name, (run, overrides) in cases.items():
            location = (f"run.root={run.parent}", f"run.name={run.name}")
            try:
                settings = load(config, [*OPTIONS, *SMALL, *location, *overrides])
                results[name] = Trainer(settings, mesh, providers())._load()
            except UserError as error:
                results[name] = str(error)
    return results


def test_no_start_of_training_executes_code_in_a_runs_files(run, config, tmp_path):
    cases = {}
    for pattern in (MODEL, OPTIMIZER):
        (tmp_path / pattern).mkdir()
        foreign = copy_with_code(run, tmp_path / pattern / "foreign", pattern)
        for name, place, overrides in (
            ("resume", foreign, RESUME),
            ("resume on another layout", foreign, (OTHER_LAYOUT,)),
            ("init.from", tmp_path / "new", (f"init.from={foreign}",)),
            ("init.moments", tmp_path / "new", (f"init.from={run}", f"init.moments={foreign}")),
            (
                "teacher",
                tmp_path / pattern / "taught",
                (f"objective.teacher={foreign}", "objective.kind=distill"),
            ),
        ):
            cases[f"{name} {pattern}"] = (place, overrides)
    messages, other = run_ranks(starting_steps, 2, config, cases)
    assert messages == other
    for name, text in messages.items():
        assert "posix.mkdir, which is code" in text, name
        assert len(text.splitlines()) == 1, name
    assert not list(tmp_path.rglob("harm"))


def swap_shards(folder: Path) -> None:
    first, second = sorted(folder.glob("*optim_states.pt"))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def truncate(folder: Path) -> None:
    file = next(folder.glob(OPTIMIZER))
    file.write_bytes(file.read_bytes()[:-64])


DAMAGES = {
    "optimizer, first bytes": lambda folder: flip(next(folder.glob(OPTIMIZER)), 0.05),
    "optimizer, middle": lambda folder: flip(next(folder.glob(OPTIMIZER)), 0.5),
    "optimizer, last bytes": lambda folder: flip(next(folder.glob(OPTIMIZER)), 0.95),
    "model": lambda folder: flip(next(folder.glob(MODEL)), 0.5),
    "truncated": truncate,
    "zeroed": lambda folder: flip(next(folder.glob(MODEL)), 0.0, count=1000),
    "swapped": swap_shards,
}


@pytest.mark.second
def test_training_continues_from_the_checkpoint_before_a_damaged_one(run, config, tmp_path):
    cases, expected = {}, {}
    for name, damage in DAMAGES.items():
        copy = Path(shutil.copytree(run, tmp_path / name.replace(", ", "_").replace(" ", "_")))
        damage(copy / "checkpoints/step_4")
        cases[name], expected[name] = (copy, RESUME), 2
        cases[f"{name}, reshaped"], expected[f"{name}, reshaped"] = (copy, (OTHER_LAYOUT,)), 2
    assert run_ranks(starting_steps, 2, config, cases) == [expected] * 2


def test_commands_use_the_checkpoint_before_a_damaged_one(run, tmp_path, capsys, caplog, refused):
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    flip(next((copy / "checkpoints/step_4").glob(OPTIMIZER)), 0.5)
    assert main(["reshape", str(copy)]) == 0
    assert "step_2" in capsys.readouterr().out
    assert "step_4 cannot be used" in caplog.text
    assert re.search("step 4 .*damaged", refused("reshape", copy, "--step", 4))


def test_python_tags_in_a_configuration_are_refused(run, tmp_path, refused):
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    text = (copy / "config.yaml").read_text()
    call = f"!!python/object/apply:os.mkdir ['{tmp_path / 'harm'}']"
    (copy / "config.yaml").write_text(text.replace("seed: 7", f"seed: {call}"))
    assert call in (copy / "config.yaml").read_text()
    for command in commands(copy, tmp_path)[:-1]:
        assert "is not YAML (could not determine a constructor for the tag" in refused(*command)
    assert not (tmp_path / "harm").exists()


def test_remote_code_of_a_dense_model_is_not_executed(tmp_path, monkeypatch, capsys, refused):
    """Its pickled weights are not read either, and no prompt asks whether to trust them."""
    monkeypatch.setattr("builtins.input", lambda question: "y")
    folder = tmp_path / "llama"
    dense_models.save("llama", folder)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": classes}))
    (folder / "custom.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'harm')!r})\n")
    plant(folder / "pytorch_model.bin", tmp_path / "harm")
    assert main(["import", str(folder)]) == 0
    assert "logits are those of transformers" in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    assert "pytorch_model.bin is pickled: save it again" in refused("import", folder)
    assert not (tmp_path / "harm").exists()

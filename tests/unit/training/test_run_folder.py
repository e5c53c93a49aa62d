import os
from pathlib import Path

import pytest

from data_pipeline import tokenizers
from megakernel.config import Config, UserError, from_yaml, to_yaml
from megakernel.training import events
from megakernel.training.run_folder import EVENT_FILES, RunFolder, events_folder

from .threads import on_ranks


def configuration(root: Path, **training: object) -> Config:
    tree = {
        "run": {"name": "r", "root": str(root)},
        "model": {"num_layers": 1, "hidden_size": 128, "num_heads": 2},
        "data": {"train": "corpus"},
        "training": {"steps": 5, "seq_len": 128, "global_batch_size": 2, **training},
    }
    return from_yaml(to_yaml(Config.model_validate(tree)))


def begin_run(config: Config) -> RunFolder:
    """The folder of a run whose first step has succeeded."""
    run = RunFolder(config)
    run.open(["cpu"])
    run.fix_configuration()
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_run_gets_its_folder_with_the_resolved_configuration(tmp_path):
    config = configuration(tmp_path)
    run = RunFolder(config)
    assert run.open(["cpu"]) == []
    assert run.path == tmp_path / "r"
    assert {path.name for path in run.path.iterdir()} == {
        "config.yaml",
        "environment.txt",
        "lock",
        "logs",
        "checkpoints",
    }
    assert from_yaml(run.config_file.read_text()) == config


def test_the_same_configuration_continues_and_each_start_is_recorded(tmp_path):
    for _ in range(3):
        RunFolder(configuration(tmp_path)).open(["cpu"])
    history = (tmp_path / "r" / "environment.txt").read_text()
    assert history.count("== started ") == 3


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "environment.txt", "events.jsonl", "lock", "logs/rank_0.log"]
)
def test_a_file_of_a_run_that_is_a_link_is_refused_and_what_it_leads_to_stays(name, tmp_path):
    begin_run(configuration(tmp_path))
    other = tmp_path / "other.txt"
    other.write_text("not the run's\n")
    file = tmp_path / "r" / name
    file.unlink(missing_ok=True)
    file.symlink_to(other)
    with pytest.raises(UserError, match=f"{name} is a link to .*other.txt"):
        RunFolder(configuration(tmp_path)).open(["cpu"])
    assert other.read_text() == "not the run's\n"


def test_checkpoints_may_be_a_link_to_another_disk(tmp_path):
    checkpoints = begin_run(configuration(tmp_path)).checkpoints
    checkpoints.rename(tmp_path / "scratch")
    checkpoints.symlink_to(tmp_path / "scratch")
    assert begin_run(configuration(tmp_path)).checkpoints.is_symlink()


def test_a_command_that_is_not_utf8_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["megakernel", "pretrain", os.fsdecode(b"f\xff.yaml")])
    RunFolder(configuration(tmp_path)).open(["cpu"])
    assert r"f\udcff.yaml" in (tmp_path / "r" / "environment.txt").read_text(encoding="utf-8")


def test_settings_that_do_not_change_the_numbers_may_change_and_are_recorded(tmp_path):
    begin_run(configuration(tmp_path))
    longer = configuration(tmp_path, steps=10)
    run = RunFolder(longer)
    [change] = run.open(["cpu"])
    assert (change.key, change.recorded, change.wanted) == ("training.steps", 5, 10)
    assert "changed: training.steps from 5 to 10\n" in run.environment_file.read_text()
    assert from_yaml(run.config_file.read_text()) == longer


def test_a_change_on_purpose_is_recorded_once_with_its_step_and_needs_no_permission_again(tmp_path):
    first = configuration(tmp_path)
    begin_run(first)
    (tmp_path / "r/checkpoints/step_3").mkdir()
    slower = first.model_copy(update={"optimizer": first.optimizer.model_copy(update={"lr": 1e-5})})
    with pytest.raises(UserError, match=r"optimizer\.lr=1e-05 was 0\.0003 .* --allow-change optimizer\.lr$"):
        RunFolder(slower).open(["cpu"])
    assert events.read(tmp_path / "r") == []
    run = RunFolder(slower, allowed=["optimizer.lr"])
    [change] = run.open(["cpu"])
    assert (change.key, change.recorded, change.wanted) == ("optimizer.lr", 3e-4, 1e-5)
    assert run.recorded == first
    assert from_yaml(run.config_file.read_text()) == slower
    assert "changed: optimizer.lr from 0.0003 to 1e-05\n" in run.environment_file.read_text()
    [event] = events.read(run.path)
    assert {key: event[key] for key in ("event", "key", "recorded", "wanted", "step")} == {
        "event": "changed",
        "key": "optimizer.lr",
        "recorded": 3e-4,
        "wanted": 1e-5,
        "step": 3,
    }
    assert RunFolder(slower).open(["cpu"]) == []
    watched = slower.model_copy(update={"training": slower.training.model_copy(update={"log_every": 3})})
    assert [change.key for change in RunFolder(watched).open(["cpu"])] == ["training.log_every"]
    assert events.read(run.path) == [event]
    longer = slower.model_copy(update={"training": slower.training.model_copy(update={"steps": 9})})
    RunFolder(longer).open(["cpu"])
    assert [entry["key"] for entry in events.read(run.path)] == ["optimizer.lr", "training.steps"]
    with pytest.raises(UserError, match=r"optimizer\.lr=0\.0003 was 1e-05"):
        RunFolder(first).open(["cpu"])


def test_another_configuration_is_refused_and_the_folder_unchanged(tmp_path):
    begin_run(configuration(tmp_path))
    before = contents(tmp_path)
    with pytest.raises(
        UserError, match=r"(?s)training\.seq_len=64 was 128.*training\.global_batch_size=4 was 2"
    ):
        RunFolder(configuration(tmp_path, seq_len=64, global_batch_size=4)).open(["cpu"])
    assert contents(tmp_path) == before


def test_a_folder_with_output_but_no_configuration_is_refused(tmp_path):
    (tmp_path / "r" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no config\.yaml; restore it"):
        RunFolder(configuration(tmp_path)).open(["cpu"])


def test_a_start_without_a_finished_step_fixes_no_configuration(tmp_path):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    tokenizers.ByteTokenizer().save(tokenizer)
    unfinished = RunFolder(configuration(tmp_path))
    unfinished.open(["cpu"])
    unfinished.keep_tokenizer(tokenizer, tokenizers.ByteTokenizer().hash)
    (unfinished.path / "tensorboard").mkdir()  # of an earlier version
    for folder in (unfinished.path, unfinished.path / "tensorboard"):
        (folder / "events.out.tfevents.1.host").touch()
    run = begin_run(configuration(tmp_path, seq_len=64))
    assert not run.tokenizer.exists()
    assert not list(run.path.rglob(EVENT_FILES))
    with pytest.raises(UserError, match=r"training\.seq_len=128 was 64"):
        RunFolder(configuration(tmp_path)).open(["cpu"])


def test_tensorboard_lists_a_run_by_its_name_unless_an_earlier_version_began_it(tmp_path):
    run = begin_run(configuration(tmp_path))
    assert (run.events, events_folder(run.path, "evaluation")) == (run.path, run.path / "evaluation")
    (run.path / "tensorboard").mkdir()
    earlier = begin_run(configuration(tmp_path)).events
    assert earlier == run.path / "tensorboard"
    assert events_folder(run.path, "analysis") == earlier / "analysis"


def test_logs_of_the_launcher_may_exist_before_the_run(tmp_path):
    (tmp_path / "r" / "logs").mkdir(parents=True)
    (tmp_path / "r" / "logs" / "rank_0.log").write_text("starting\n")
    RunFolder(configuration(tmp_path)).open(["cpu"])
    assert (tmp_path / "r" / "logs" / "rank_0.log").read_text() == "starting\n"


def test_an_unwritable_root_is_refused_in_one_line_with_key_and_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"^run\.root=.*cannot be written.*choose another run\.root$"
    ) as error:
        RunFolder(configuration(tmp_path / "file" / "runs")).open(["cpu"])
    assert "\n" not in str(error.value)


def test_rank_0_writes_and_its_refusal_reaches_all(tmp_path):
    def work(config: Config):
        return on_ranks(3, lambda ranks: RunFolder(config, ranks).open(["cpu"]))

    assert work(configuration(tmp_path)) == [[], [], []]
    assert (tmp_path / "r" / "environment.txt").read_text().count("== started ") == 1
    begin_run(configuration(tmp_path))
    refused = work(configuration(tmp_path, seq_len=64))
    assert all(isinstance(error, UserError) for error in refused)
    assert len({str(error) for error in refused}) == 1
    assert "training.seq_len=64" in str(refused[0])


def test_a_run_keeps_its_tokenizer_and_refuses_another(tmp_path):
    run = RunFolder(configuration(tmp_path))
    run.open(["cpu"])
    mine, other = tokenizers.ByteTokenizer(), tokenizers.train_bpe(["some text to learn from"] * 50, 300)
    for name, tokenizer in (("mine", mine), ("other", other)):
        (tmp_path / name).mkdir()
        tokenizer.save(tmp_path / name)
    run.keep_tokenizer(tmp_path / "mine", mine.hash)
    assert tokenizers.load(run.tokenizer).hash == mine.hash
    run.keep_tokenizer(tmp_path / "mine", mine.hash)
    with pytest.raises(UserError, match=r"^data\.train holds a corpus of another tokenizer .* run\.name$"):
        run.keep_tokenizer(tmp_path / "other", other.hash)
    assert tokenizers.load(run.tokenizer).hash == mine.hash

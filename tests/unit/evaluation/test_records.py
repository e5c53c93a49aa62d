"""Recorded results of an evaluation, as files and in TensorBoard."""

import fcntl
import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megakernel.config import Config
from megakernel.evaluation import records
from megakernel.evaluation.answer_counts import AnswerCounts, Cell
from megakernel.evaluation.records import file_name, record, send
from megakernel.training.run_folder import EVENT_FILES
from tests.tracked import trackio_history

SPEC = "passkey:length=64+128,depths=2"
NAME = "passkey-length-64-128-depths-2"


def counts(step: int, right: int) -> AnswerCounts:
    cells = [Cell(length, depth, 4, 4, right, 24, 12, 6.0) for length in (64, 128) for depth in (0.0, 1.0)]
    return AnswerCounts(SPEC, "runs/x", step, cells)


def read(run: Path) -> EventAccumulator:
    """The TensorBoard events of the evaluation folder."""
    events = EventAccumulator(str(run / "evaluation"))
    events.Reload()
    return events


def test_a_result_is_written_as_json_table_and_plot(tmp_path):
    file = record(tmp_path, 20, SPEC, counts(20, 3))
    assert file == tmp_path / "evaluation" / "step_20" / f"{NAME}.json"
    recorded = json.loads(file.read_text())
    assert (recorded["task"], recorded["step"], recorded["accuracy"], len(recorded["cells"])) == (
        SPEC,
        20,
        0.75,
        4,
    )
    assert recorded["scalars"] == counts(20, 3).scalars()
    assert "| 64 | 75% | 75% | 8 | 75.0% | 0.2500 |" in file.with_suffix(".md").read_text()
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard_has_only_the_last_result_of_every_step(tmp_path):
    record(tmp_path, 20, SPEC, counts(20, 3))
    record(tmp_path, 10, SPEC, counts(10, 1))  # an older checkpoint, measured later
    record(tmp_path, 20, SPEC, counts(20, 2))  # another result at the same step
    events = read(tmp_path)
    accuracy = events.Scalars(f"evaluation/{NAME}/accuracy")
    assert [(event.step, event.value) for event in accuracy] == [(10, 0.25), (20, 0.5)]
    assert set(events.Tags()["scalars"]) == {f"evaluation/{NAME}/{name}" for name in counts(1, 1).scalars()}
    tables = events.Tensors(f"evaluation/{NAME}/text_summary")
    assert [event.step for event in tables] == [10, 20]
    plots = events.Images(f"evaluation/{NAME}")
    assert [event.step for event in plots] == [10, 20]
    assert plots[0].width > 100
    assert len(list((tmp_path / "evaluation").glob(EVENT_FILES))) == 1


def test_evaluations_of_a_run_of_an_earlier_version_stay_where_they_are(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    record(tmp_path, 20, SPEC, counts(20, 3))
    assert len(list((tmp_path / "tensorboard" / "evaluation").glob(EVENT_FILES))) == 1
    assert not list((tmp_path / "evaluation").glob(EVENT_FILES))


def test_evaluations_that_end_together_write_events_one_after_the_other(tmp_path, monkeypatch):
    write_events = records._write_events

    def write_locked(run: Path) -> None:
        with (run / "evaluation" / ".lock").open("a") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_events(run)

    monkeypatch.setattr(records, "_write_events", write_locked)
    record(tmp_path, 10, SPEC, counts(10, 1))
    assert read(tmp_path).Scalars(f"evaluation/{NAME}/accuracy")


def test_specs_too_long_for_a_file_name_are_recorded_under_different_names(tmp_path):
    specs = [f"passkey:filler=/{'ä' * 150}/{number}.txt" for number in range(2)]
    files = {record(tmp_path, 10, spec, counts(10, 1)) for spec in specs}
    assert len(files) == 2
    assert len(read(tmp_path).Tags()["scalars"]) == 2 * len(counts(10, 1).scalars())


def test_no_events_are_written_without_tensorboard(tmp_path):
    record(tmp_path, 20, SPEC, counts(20, 3), tensorboard=False)
    assert not list(tmp_path.rglob(EVENT_FILES))


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("lm", "lm"),
        ("needle:filler=books/one.txt,length=4096", "needle-filler-books-one.txt-length-4096"),
    ],
)
def test_a_spec_becomes_a_file_name(spec, name):
    assert file_name(spec) == name


def test_trackers_get_results_as_a_run_beside_the_training_run(tmp_path):
    run, project, lines = tmp_path / "first", tmp_path.name, []
    config = Config.model_validate(
        {
            "run": {"name": "first", "root": str(tmp_path)},
            "model": {"num_layers": 1, "hidden_size": 8, "num_heads": 2},
            "data": {"train": "corpus"},
            "training": {"steps": 5, "seq_len": 16, "global_batch_size": 1},
            "logging": {"trackio": {"project": project}},
        }
    )
    for step, right in ((10, 1), (20, 3)):  # two commands
        file = record(run, step, SPEC, counts(step, right))
        send(config, run, step, [file], lines.append)
    tag = f"evaluation/{NAME}"
    shown = trackio_history(project, "first/evaluation")
    assert [(line["step"], line[f"{tag}/accuracy"]) for line in shown] == [(10, 0.25), (20, 0.75)]
    assert shown[1][tag]["_value"] == file.with_suffix(".md").read_text()
    assert not [line for line in lines if "warning" in line]

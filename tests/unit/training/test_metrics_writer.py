import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.summary.writer import event_file_writer

from megakernel.config import Config
from megakernel.training.observing.histograms import SIGNED, Histogram
from megakernel.training.observing.metrics_writer import HPARAMS, MetricsWriter, StepMetrics, told_keys
from tests.disk import files_of_at_most


class Folder:
    def __init__(self, root: Path):
        self.metrics = root / "metrics.jsonl"
        self.tensorboard = root / "tensorboard"

    def continued_from(self, done_steps: int) -> MetricsWriter:
        return MetricsWriter(self.metrics, self.tensorboard, done_steps)

    def train(self, done_steps: int, until: int, offset: float = 0.0) -> None:
        with self.continued_from(done_steps) as writer:
            for step in range(done_steps + 1, until + 1):
                writer.write(step, StepMetrics({"train/loss": step + offset, "train/lr": 0.5}))

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]

    def events(self) -> EventAccumulator:
        reader = EventAccumulator(str(self.tensorboard), size_guidance={"scalars": 0})
        return reader.Reload()

    def on_disk(self) -> list[tuple[int, str]]:
        """Step and tag of every event in the files, those that a reader hides included."""
        files = sorted(self.tensorboard.iterdir())
        events = [event for file in files for event in EventFileLoader(str(file)).Load()]
        return [(event.step, value.tag) for event in events for value in event.summary.value]

    def curve(self, tag: str = "train/loss") -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in self.events().Scalars(tag)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Folder:
    # Readers sort the files by name: time in seconds, process id, and how many files the process opened before. A run
    # opens one file per process. Here many are opened within a second, and the tenth would come first.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    return Folder(tmp_path)


def test_json_lines_and_tensorboard_hold_the_same_numbers(folder):
    folder.train(0, 3, offset=0.25)
    assert folder.lines() == [{"step": i, "train/loss": i + 0.25, "train/lr": 0.5} for i in (1, 2, 3)]
    assert folder.curve() == [(i, i + 0.25) for i in (1, 2, 3)]
    assert folder.curve("train/lr") == [(i, 0.5) for i in (1, 2, 3)]


def test_curves_continue_after_a_restart_without_repeated_steps(folder):
    folder.train(0, 7, offset=0.0)
    folder.train(4, 9, offset=0.25)  # continued from the checkpoint of step 4
    folder.train(8, 10, offset=0.5)
    expected = [*((i, i) for i in (1, 2, 3, 4)), *((i, i + 0.25) for i in (5, 6, 7, 8)), (9, 9.5), (10, 10.5)]
    assert [(line["step"], line["train/loss"]) for line in folder.lines()] == expected
    assert folder.curve() == expected


def test_a_run_that_starts_over_keeps_one_initial_evaluation(folder):
    for _ in range(2):
        with folder.continued_from(0) as writer:
            writer.write(0, StepMetrics({"eval/loss": 5.5}))
            writer.write(1, StepMetrics({"train/loss": 5.0}))
    assert [line["step"] for line in folder.lines()] == [0, 1]
    assert folder.curve("eval/loss") == [(0, 5.5)]
    assert folder.curve() == [(1, 5.0)]


def test_abandoned_steps_are_removed_before_they_are_reached_again(folder):
    folder.train(0, 7)
    folder.train(4, 5)
    assert [step for step, _ in folder.curve()] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in folder.lines()] == [1, 2, 3, 4, 5]


def test_an_open_tensorboard_shows_no_repeated_steps(folder):
    folder.train(0, 7)
    reader = folder.events()
    folder.train(4, 6, offset=0.25)
    reader.Reload()
    assert [event.step for event in reader.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_a_killed_process_loses_no_written_step(folder):
    script = f"""
        import os, signal
        from pathlib import Path
        from megakernel.training.observing.metrics_writer import MetricsWriter, StepMetrics
        writer = MetricsWriter(Path({str(folder.metrics)!r}), Path({str(folder.tensorboard)!r}), 0)
        for step in (1, 2, 3):
            writer.write(step, StepMetrics({{"train/loss": float(step)}}))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)]).returncode == -9
    assert [line["step"] for line in folder.lines()] == [1, 2, 3]
    assert [step for step, _ in folder.curve()] == [1, 2, 3]


def test_records_truncated_by_a_crash_are_skipped(folder):
    folder.train(0, 3)
    with folder.metrics.open("a") as file:
        file.write('{"step": 4, "train/lo')
    [events] = folder.tensorboard.iterdir()
    os.truncate(events, events.stat().st_size - 5)  # inside the last record, train/lr of step 3
    folder.train(3, 5)
    assert [line["step"] for line in folder.lines()] == [1, 2, 3, 4, 5]
    assert [step for step, _ in folder.curve()] == [1, 2, 3, 4, 5]
    assert [step for step, _ in folder.curve("train/lr")] == [1, 2, 4, 5]


@pytest.mark.parametrize(
    "garbage", [b"\0" * 64, bytes(range(255, 190, -1)), b"\xfe"], ids=["zeros", "other bytes", "one byte"]
)
def test_what_a_crash_of_the_machine_left_in_the_files_does_not_stop_the_next_start(folder, garbage):
    folder.train(0, 3)
    [events] = folder.tensorboard.iterdir()
    events.write_bytes(events.read_bytes() + garbage)
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    folder.metrics.write_bytes(lines[0] + garbage + lines[1][-5:] + lines[2])
    folder.train(2, 4)
    assert [line["step"] for line in folder.lines()] == [1, 3, 4]
    assert [step for step, _ in folder.curve()] == [1, 2, 3, 4]


def test_a_damaged_event_ends_its_file(folder):
    folder.train(0, 3)
    [events] = folder.tensorboard.iterdir()
    data = bytearray(events.read_bytes())
    data[-20:-4] = b"\xff" * 16  # in the body of the last event, train/lr of step 3
    events.write_bytes(data)
    folder.train(2, 3)
    assert [step for step, _ in folder.curve()] == [1, 2, 3]


def entry(step: int) -> StepMetrics:
    histogram = Histogram()
    histogram.add(torch.full((3,), float(step)), SIGNED)
    return StepMetrics(
        {"train/loss": float(step)}, {"weights/w": histogram}, {}, {"samples": f"sample {step}"}
    )


TAGS = ("train/loss", "weights/w", "samples/text_summary")


def test_a_restart_removes_abandoned_entries_of_every_kind(folder):
    for done_steps, until in ((0, 5), (2, 4), (3, 4)):
        with folder.continued_from(done_steps) as writer:
            for step in range(done_steps + 1, until + 1):
                writer.write(step, entry(step))
    assert sorted(folder.on_disk()) == sorted((step, tag) for step in (1, 2, 3, 4) for tag in TAGS)
    assert len(list(folder.tensorboard.iterdir())) == 3


def test_event_files_that_become_empty_are_deleted_and_others_stay_unchanged(folder):
    folder.train(0, 2)
    [kept] = folder.tensorboard.iterdir()
    before = kept.read_bytes(), kept.stat().st_ino
    folder.train(2, 3)
    folder.train(2, 3)
    assert (kept.read_bytes(), kept.stat().st_ino) == before
    assert len(list(folder.tensorboard.iterdir())) == 2
    folder.train(0, 1)
    assert len(list(folder.tensorboard.iterdir())) == 1


def test_a_histogram_is_read_back_unchanged(folder):
    with folder.continued_from(0) as writer:
        writer.write(7, entry(7))
    [event] = folder.events().Histograms("weights/w")
    found = event.histogram_value
    assert (event.step, found.num, found.min, found.max, found.sum) == (7, 3, 7, 7, 21)
    assert list(found.bucket) == [3]


def test_non_finite_numbers_leave_valid_json(folder):
    with folder.continued_from(0) as writer:
        writer.write(1, StepMetrics({"train/loss": float("nan"), "train/grad_norm": float("inf")}))
    assert folder.lines() == [{"step": 1, "train/loss": None, "train/grad_norm": None}]


def test_tensorboard_can_be_left_out(folder):
    with MetricsWriter(folder.metrics, None, 0) as writer:
        writer.write(1, StepMetrics({"train/loss": 1.0}))
    assert not folder.tensorboard.exists()


def test_the_configuration_is_written_once_beside_the_curves(folder):
    config = Config.model_validate(
        {
            "run": {"name": "r"},
            "model": {"num_layers": 1, "hidden_size": 8, "num_heads": 2},
            "data": {"train": "corpus"},
            "training": {"steps": 5, "seq_len": 16, "global_batch_size": 1},
        }
    )
    for done_steps in (0, 0, 1):  # killed before the first checkpoint, then once after it
        with folder.continued_from(done_steps) as writer:
            writer.describe(config, packing="| corpus |")
            writer.write(done_steps + 1, StepMetrics({"train/loss": 1.0}))
    events = folder.events()
    [text] = events.Tensors("config/text_summary")
    assert b"    run:\n      name: r\n" in text.tensor_proto.string_val[0]
    [packing] = events.Tensors("packing/text_summary")
    assert packing.tensor_proto.string_val == [b"| corpus |"]
    tags = [tag for _, tag in folder.on_disk()]
    assert tags.count("custom_scalars__config__") == tags.count("_hparams_/experiment") == 1
    assert "hparams" in events.summary_metadata["_hparams_/experiment"].plugin_data.plugin_name
    assert b"optimizer.lr" in events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert not [path for path in folder.tensorboard.iterdir() if path.is_dir()], (
        "no second run appears in TensorBoard"
    )


def test_hparams_are_the_keys_that_are_not_at_their_defaults_and_those_that_always_matter():
    def keys(**sections) -> dict:
        tree = {
            "run": {"name": "r"},
            "model": {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "attention": "softmax"},
            "data": {"train": "corpus"},
            "training": {"steps": 5, "seq_len": 16, "global_batch_size": 1},
        }
        return told_keys(Config.model_validate(tree | sections))

    plain = keys()
    assert plain.keys() >= set(HPARAMS)
    assert plain["optimizer.lr"] == 3e-4
    assert not {
        key for key in plain if key.startswith(("run.name", "run.root", "logging", "checkpoint", "parallel"))
    }
    changed = keys(
        parallel={"context": 2},
        optimizer={"trained": "lora", "lora": {"rank": 4}},
        deepspeed={"a": {"b": 1}},
        logging={"sample_tokens": 3},
        init={"from": "dense"},
    )
    new = {key: value for key, value in changed.items() if key not in plain}
    # A section that is null by default is shown as a whole.
    assert new.pop("optimizer.lora.alpha") == 16.0
    assert {key for key in new if not key.startswith("optimizer.lora.")} == {
        *("parallel.context", "optimizer.trained", "deepspeed.a.b", "init.from")
    }


@pytest.mark.parametrize("full", ["metrics.jsonl", "tensorboard"])
def test_a_full_disk_raises_one_error_that_names_the_file(folder, capsys, full):
    writes_events = full == "tensorboard"
    entry = (
        StepMetrics(texts={"text": "x" * 2000})
        if writes_events
        else StepMetrics(scalars={"train/loss": 1 / 3})
    )

    def train() -> None:
        tensorboard = folder.tensorboard if writes_events else None
        with MetricsWriter(folder.metrics, tensorboard, 0) as writer:
            for step in range(1, 100):
                writer.write(step, entry)

    with pytest.raises(OSError, match="File too large") as caught, files_of_at_most(1500):
        train()
    assert caught.value.filename.endswith(full)
    assert capsys.readouterr().err == ""

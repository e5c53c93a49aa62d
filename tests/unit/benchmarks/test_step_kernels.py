"""Summaries of a profile's trace: how long the device works, which kernels take the time, and what the gaps are."""

import gzip
import json

import pytest

from benchmarks.kernels.step import Gap, Interval, analyze, main, of_events, summary, without_inner


def events(*rows):
    keys = ("cat", "name", "ts", "dur", "tid")
    return [{"ph": "M", "name": "process_name"}, *({"ph": "X"} | dict(zip(keys, row)) for row in rows)]


def write_trace(path, *rows):
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events(*rows)}, file)
    return path


def test_overlapping_kernels_count_once_and_times_are_per_step(tmp_path):
    trace = write_trace(
        tmp_path / "rank_0.json.gz",
        ("user_annotation", "step 10", 0, 4000),
        ("user_annotation", "step 11", 4000, 4000),
        ("cpu_op", "aten::mm", 0, 9000),
        ("kernel", "void merge<int>", 1000, 2000),
        ("kernel", "void merge<int>", 2000, 2000),
        ("gpu_memcpy", "Memcpy DtoH", 9000, 1000),
    )
    first, _, *rows = summary(trace)
    assert first == (
        "2 step(s) of 5.0 ms each; the GPU works 40% of the time. "
        "Gaps of more than 10 µs: 1 a step, 3.00 ms; shorter ones: 0, 0.00 ms."
    )
    assert rows[2:4] == ["| `merge<int>` | 1 | 2.00 | 40.0% |", "| `Memcpy DtoH` | 0.5 | 0.50 | 10.0% |"]
    assert rows[7:9] == ["| 5.000 | - | `merge<int>` | `Memcpy DtoH` |", "| 1.000 | - | - | `merge<int>` |"]


def test_gaps_are_all_the_time_without_work():
    work = [
        Interval(10, 30, "a"),
        Interval(12, 20, "inside of a"),
        Interval(30, 40, "b"),
        Interval(55, 60, "c"),
    ]
    phases = [Interval(0, 70, "outer"), Interval(0, 45, "forward"), Interval(41, 60, "backward")]
    found = analyze(work, [Interval(5, 65, "step 1"), Interval(65, 70, "step 2")], phases)
    assert found.gaps == [
        Gap(5, 10, "", "a", "forward"),
        Gap(40, 55, "b", "c", "forward"),
        Gap(60, 70, "c", "", "outer"),
    ]
    assert (found.steps, found.wall, found.busy) == (2, 65, 35)
    assert found.wall == found.busy + sum(gap.end - gap.start for gap in found.gaps)
    assert found.busy_share == pytest.approx(35 / 65)


def test_work_that_outlasts_the_last_step_belongs_to_it():
    found = analyze([Interval(0, 4, "a"), Interval(6, 20, "a")], [Interval(2, 10, "step 1")])
    assert (found.wall, found.busy) == (20, 18)
    assert found.spent == {"a": [4, 14]}


def test_without_a_gap_the_device_is_busy_all_the_time():
    found = analyze([Interval(0, 4, "a"), Interval(4, 9, "b")], [])
    assert (found.steps, found.busy_share, found.gaps) == (1, 1.0, [])


def test_an_operation_counts_without_those_that_it_calls():
    nested = [Interval(0, 10, "linear"), Interval(1, 3, "t"), Interval(3, 9, "mm"), Interval(4, 5, "empty")]
    times = {x.name: x.end - x.start for x in without_inner([*nested, Interval(20, 21, "add")])}
    assert times == {"linear": 2, "t": 2, "mm": 5, "empty": 1, "add": 1}


def test_operations_of_a_cpu_take_the_place_of_kernels():
    found = of_events(
        events(
            ("user_annotation", "step 1", 0, 100, 1),
            ("user_annotation", "forward", 0, 50, 1),
            ("cpu_op", "aten::linear", 10, 30, 1),
            ("cpu_op", "aten::mm", 20, 10, 1),
            ("cpu_op", "aten::mm", 25, 25, 2),
        )
    )
    assert not found.on_gpu
    assert (found.wall, found.busy) == (100, 40)
    assert found.spent == {"aten::linear": [20], "aten::mm": [10, 25]}


def test_a_trace_without_work_and_a_missing_one_are_one_line(tmp_path, capsys, monkeypatch):
    trace = write_trace(tmp_path / "rank_0.json.gz", ("user_annotation", "step 1", 0, 9000))
    assert summary(trace) == [f"{trace} has neither kernels nor operations."]
    monkeypatch.setattr("sys.argv", ["step_kernels", str(tmp_path / "none")])
    assert main() == 2
    assert capsys.readouterr().err.count("\n") == 1

"""Summaries of a profile's trace: how long the GPU works, and which kernels take the time."""

import gzip
import json

from benchmarks.kernels.step import main, summary


def write_trace(path, *events):
    keys = ("cat", "name", "ts", "dur")
    listed = [{"ph": "X"} | dict(zip(keys, event)) for event in events]
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [{"ph": "M", "name": "process_name"}, *listed]}, file)
    return path


def test_overlapping_kernels_count_once_and_times_are_per_step(tmp_path):
    trace = write_trace(
        tmp_path / "rank_0.json.gz",
        ("user_annotation", "step 10", 0, 4000),
        ("user_annotation", "step 11", 4000, 4000),
        ("cpu_op", "aten::mm", 0, 9000),
        ("kernel", "void merge<int>", 1000, 2000),
        ("kernel", "void merge<int>", 2000, 2000),
        ("gpu_memcpy", "Memcpy DtoH", 10000, 1000),
    )
    first, _, *rows = summary(trace)
    assert first == "2 step(s) of 5.0 ms each; the GPU works 40% of the time."
    assert rows[2:4] == ["| `merge<int>` | 1 | 2.00 | 40.0% |", "| `Memcpy DtoH` | 0.5 | 0.50 | 10.0% |"]


def test_a_trace_without_a_gpu_and_a_missing_one_are_one_line(tmp_path, capsys, monkeypatch):
    trace = write_trace(tmp_path / "rank_0.json.gz", ("cpu_op", "aten::mm", 0, 9000))
    assert summary(trace) == [f"{trace} has no kernels of a GPU."]
    monkeypatch.setattr("sys.argv", ["step_kernels", str(tmp_path / "none")])
    assert main() == 2
    assert capsys.readouterr().err.count("\n") == 1

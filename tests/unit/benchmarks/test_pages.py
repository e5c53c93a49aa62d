"""Tables of result pages, written and read."""

import subprocess
import sys
from pathlib import Path

from benchmarks import flurka_speed, uptraining
from benchmarks.page import command_line, table, table_row
from megakernel.config import load

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def test_tables_have_a_separator_and_right_aligned_numbers():
    assert table(["a", "b"], [table_row(["x", 1])]) == ["| a | b |", "|---|---|", "| x | 1 |", ""]
    assert table(["a", "b"], [], numbers=True) == ["| a | b |", "| --- | ---: |", ""]


def test_a_command_sets_the_threads_only_if_the_user_did(monkeypatch):
    command = "python -m benchmarks.lra lra.yaml --out 'my page.md'"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert command_line("lra", ["lra.yaml", "--out", "my page.md"]) == f"OMP_NUM_THREADS=3 {command}"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert command_line("lra", ["lra.yaml", "--out", "my page.md"]) == command


def test_the_page_of_an_uptraining_states_its_command_and_processes():
    command = "python -m benchmarks.uptraining --nproc 3"
    dense = {"name": "dense", "loss": 4.0, "beyond": 4.0}
    others = {
        key: {"name": key, "tokens": 5, "loss": 4.5, "beyond": 4.5} for key in ("swapped", "trained_on")
    }
    report = {"window": 32, "dense": dense, "stages": [], "ablations": [], "recovered": {}, **others}
    page = uptraining.page(load(uptraining.DENSE), 4.0, {"without alpha": report}, 17, 3, command)
    assert f"`{command}`, " in page
    assert ", 3 process(es); steps" in page


def test_a_wrong_override_of_a_benchmark_is_one_line():
    command = [sys.executable, "-m", "benchmarks.long_sequences", "training.stepz=1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "stepz" in line


def test_speed_curves_show_every_measurement_of_the_page():
    rows = flurka_speed.measurements((RESULTS / "flurka_speed_cpu.md").read_text())
    assert len(rows) == 16 * 3
    assert {"sweep": "d_k", "size": 480, "layer": "FLuRKA (RNN)", "ms": 381} in rows
    assert {"sweep": "d_m", "size": 1024, "layer": "kernel (Performer)", "ms": 1867} in rows

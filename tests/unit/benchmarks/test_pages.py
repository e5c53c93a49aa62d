"""Tables of result pages, written and read."""

from pathlib import Path

from benchmarks import flurka_speed
from benchmarks.page import command_line, table, table_row

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def test_tables_have_a_separator_and_right_aligned_numbers():
    assert table(["a", "b"], [table_row(["x", 1])]) == ["| a | b |", "|---|---|", "| x | 1 |", ""]
    assert table(["a", "b"], [], numbers=True) == ["| a | b |", "| --- | ---: |", ""]


def test_a_command_sets_the_threads_only_if_the_user_did(monkeypatch):
    command = "python -m benchmarks.experiments lra.yaml --out 'my page.md'"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert command_line("experiments", ["lra.yaml", "--out", "my page.md"]) == f"OMP_NUM_THREADS=3 {command}"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert command_line("experiments", ["lra.yaml", "--out", "my page.md"]) == command


def test_speed_curves_show_every_measurement_of_the_page():
    rows = flurka_speed.measurements((RESULTS / "flurka_speed_cpu.md").read_text())
    assert len(rows) == 16 * 3
    assert {"sweep": "d_k", "size": 480, "layer": "FLuRKA (RNN)", "ms": 381} in rows
    assert {"sweep": "d_m", "size": 1024, "layer": "kernel (Performer)", "ms": 1867} in rows

"""Numbers that pages of results are made into, and made from."""

from pathlib import Path

from benchmarks import flurka_speed, skyformer_error

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def test_speed_curves_show_every_measurement_of_the_page():
    rows = flurka_speed.measurements((RESULTS / "flurka_speed_cpu.md").read_text())
    assert len(rows) == 16 * 3
    assert {"sweep": "d_k", "size": 480, "layer": "FLuRKA (RNN)", "ms": 381} in rows
    assert {"sweep": "d_m", "size": 1024, "layer": "kernel (Performer)", "ms": 1867} in rows


def test_the_table_of_errors_marks_the_best_and_averages_layers():
    rows = [
        {
            "weights": "trained",
            "length": 128,
            "features": features,
            "mechanism": name,
            "layer": layer,
            "error": error + layer,
        }
        for features, name, error in ((16, "performer", 0.5), (16, "uniform", 0.25), (32, "performer", 0.125))
        for layer in (0, 1)
    ]
    text = "\n".join(skyformer_error.tables(rows))
    assert "## Trained weights, 128 tokens" in text
    assert "| 16 | 1.000 | **0.750** |" in text
    assert "| 32 | **0.625** |  |" in text
    assert skyformer_error.summary(rows) == "* performer: 1 with 16 features, 0.625 with 32."

"""The HTML page of an up-training's report."""

import json
import re
from dataclasses import replace

from megakernel.analysis.uptraining_page import write_page
from megakernel.uptraining.report import Measured
from tests.unit.uptraining.test_report import report_of


def test_the_page_has_the_tables_the_curves_and_a_map_of_each_statistic(tmp_path):
    run = tmp_path / "1-main"
    run.mkdir()
    entries = [
        {"step": step, "train/loss": 3.0 - step / 10, "train/tokens": 100 * step} for step in (1, 2, 3)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    heads = {
        f"transfer/{name}/layer_{i}/head_{j}": 0.1 * i + j
        for name in ("error", "far_mass")
        for i in (0, 1)
        for j in (0, 1)
    }
    stage = Measured("distillation", 2.5, 2.6, tokens=300, folder=str(run))
    replace(report_of(), stages=[stage], heads=heads).write(tmp_path)
    page = write_page(tmp_path).read_text()
    assert page.count("<svg") == 4  # validation, training, two statistics
    assert "<td>distillation</td>" in page
    assert re.findall("<h2>(.*)</h2>", page)[-3:] == [
        "Validation loss",
        "Training loss of each stage",
        "Heads, at the end of the transfer",
    ]
    assert "| 1 | 0 |" not in page  # a map has the heads instead of a table
    assert not re.search("<(script|link|img)", page)  # it needs no other file


def test_names_are_text_and_missing_numbers_are_empty(tmp_path):
    heads = {"transfer/error/layer_0/head_0": None, "transfer/error/layer_0/head_1": 1.0}
    replace(report_of(), config="runs/<script>x</script>", heads=heads, stages=[]).write(tmp_path)
    page = write_page(tmp_path).read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert page.count("<svg") == 2

"""The picture of the README: its points, and the committed file."""

import re
from pathlib import Path

import pytest

from benchmarks.copying_picture import CONFIGURED, ROOT, SHOWN, Shown, draw, gflops_of, losses_of
from megakernel.config import UserError, yaml_text

PICTURE = ROOT / "docs" / "images" / "copying.svg"


def test_the_readme_has_the_numbers_of_the_picture():
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| ")]
    names = {"FLuRKA": "the same cost", "windows, 1 of 4 layers\nsoftmax": "copying", SHOWN[2].label: "both"}
    for shown in SHOWN:
        if shown.label in names:
            (row,) = (row for row in rows if row.startswith(f"| {names[shown.label]}"))
            assert all(f"{loss:.2f}" in row for loss in losses_of(shown))
            layers = CONFIGURED if shown.note else shown.model_layers
            assert f"{gflops_of(layers, 8192):.1f} and {gflops_of(layers):.1f}" in row
            if shown.note:
                assert f"({gflops_of(shown.model_layers):.1f} at 1M)" in row


def test_the_picture_costs_the_selection_that_was_trained():
    (study,) = (shown for shown in SHOWN if shown.note)
    models = yaml_text.read(ROOT / "benchmarks" / "experiments" / "far_context.yaml")["models"]
    trained, drawn = models["local_selected_unrotated"][-1], study.layers[-1]
    assert {key: drawn[key] for key in ("near", "selection")} == {
        key: trained[key] for key in ("near", "selection")
    }


@pytest.mark.parametrize(
    ("model", "pages", "missing"),
    [
        ("nobody", ["far_context_hybrids_cpu"], r"hybrids_cpu\.md has no row of nobody with seed 0"),
        ("local_softmax", ["far_context_hybrids_cpu"] * 2, r"no row of local_softmax with seed 1"),
    ],
)
def test_a_row_that_no_page_has_is_named(model: str, pages: list[str], missing: str):
    with pytest.raises(UserError, match=missing):
        losses_of(Shown("", pages, model, []))


def test_the_committed_picture_is_the_one_that_is_drawn(tmp_path: Path):
    draw(tmp_path / "copying.svg")
    paths = [re.findall(r' d="([^"]*)"', file.read_text()) for file in (tmp_path / "copying.svg", PICTURE)]
    assert len(paths[0]) > 50
    assert paths[0] == paths[1]

"""Overrides for the tables of trained mechanisms, and rows from the runs."""

import json
from pathlib import Path

import pytest

from benchmarks import lra, sparsity, training_runs
from megakernel.config import PRESETS, load

CONFIGS = Path(__file__).parents[3] / "configs" / "lra"


def run_folder(folder: Path, kept: list[int], **tags: dict[int, float]) -> Path:
    """Write metrics.jsonl and empty checkpoint folders."""
    lines = [
        {"step": step, f"eval/{tag}": value} for tag, values in tags.items() for step, value in values.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in kept:
        (folder / "checkpoints" / f"step_{step}").mkdir(parents=True)
    return folder


def test_the_best_step_has_a_kept_checkpoint(tmp_path: Path):
    accuracy = {10: 0.9, 20: 0.5, 30: 0.7, 40: 0.7}
    assert training_runs.best_step(run_folder(tmp_path, [20, 30, 40], accuracy=accuracy)) == 40


def test_without_accuracy_the_best_step_has_the_lowest_loss(tmp_path: Path):
    assert training_runs.best_step(run_folder(tmp_path, [10, 20], loss={10: 1.0, 20: 2.0})) == 10


@pytest.mark.parametrize(
    ("setting", "task", "preset"),
    [
        ("kl", "text", "gmm_rks"),
        *(
            ("skyformer", task, "performer")
            for task in ("listops", "text", "retrieval", "image", "pathfinder")
        ),
    ],
)
def test_a_paper_has_its_numbers_of_samples(setting: str, task: str, preset: str):
    config = CONFIGS / setting / f"{task}.yaml"
    loaded = load(config, lra.overrides_of(config, preset, 2, []))
    assert (loaded.run.name, loaded.run.seed) == (f"lra-{setting}-{task}-{preset}-2", 2)
    assert loaded.model.attention.feature_map.samples == 128


def test_configurations_have_the_numbers_of_samples_in_the_table():
    for task in lra.SAMPLES:
        path = CONFIGS / "kl" / f"{task}.yaml"
        own = load(path).model.attention
        overridden = load(path, lra.overrides_of(path, "fastfood_prf", 0, [])).model.attention
        assert own == overridden


def test_presets_in_the_tables_exist():
    assert {preset for samples in lra.SAMPLES.values() for preset in samples} | set(lra.FEATURES) <= set(
        PRESETS
    )


def test_results_are_means_with_sample_deviations():
    assert lra.mean_and_deviation([0.5]) == "0.5000"
    assert lra.mean_and_deviation([0.4, 0.5, 0.6]) == "0.5000 ± 0.1000"


def test_learning_curves_are_written_as_a_table_and_a_csv_file(tmp_path: Path):
    found = [
        sparsity.LearningCurve("gmm_rks", 0.1, {0: 0.1, 100: 0.55, 200: 0.95}),
        sparsity.LearningCurve("gmm_prf", 0.1, {0: 0.1}),
    ]
    text = sparsity.page("command", found)
    assert "| 0.1 | `gmm_rks` | 100 | 100 | 200 | 0.9500 at 200 |" in text
    assert "| 0.1 | `gmm_prf` | never | never | never | 0.1000 at 0 |" in text
    sparsity.write_curves(found, tmp_path / "curves.csv")
    assert (tmp_path / "curves.csv").read_text().splitlines()[1:3] == [
        "0.1,gmm_rks,0,0.1000",
        "0.1,gmm_rks,100,0.5500",
    ]

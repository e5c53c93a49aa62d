"""Results on a task of the Long Range Arena or of GLUE: each mechanism is trained with several seeds and tested.

    python -m benchmarks.lra configs/lra/kl/listops.yaml --attention softmax,fastfood_prf --seeds 3

Every run is `megakernel pretrain CONFIG` with overrides of model.attention, run.seed and run.name, in runs/. The same
command again resumes stopped runs and reads finished ones. Of a run's kept checkpoints the one with the best validation
accuracy is measured, on the test split if the data has one, otherwise on the validation split.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import command_line, page_parser, run_main, table_page, table_row, write_page
from benchmarks.training_runs import add_preset_options, best_step, train_run
from data_pipeline.manifest import Manifest
from megakernel.config import load
from megakernel.evaluation import Evaluation, evaluate_run

_LEARNED = ("gmm_rks", "fastfood_rks", "generative_rks", "gmm_prf", "generative_prf")
_TABLE_7 = {
    "listops": (256, 64, 256, 256, 128),
    "text": (128, 64, 256, 256, 128),
    "retrieval": (64, 32, 128, 128, 64),
    "image": (128, 8, 128, 128, 8),
}
SAMPLES = {task: dict(zip(_LEARNED, row)) for task, row in _TABLE_7.items()}
"""Random samples M by task (*Learning the Transformer Kernel*, table 7); fastfood_prf has as many as fastfood_rks."""

FEATURES: dict[str, dict[str, Any]] = {
    "skyformer": {"skyformer": {"features": 128}},
    "nystromformer": {"nystromformer": {"landmarks": 128}},
    "linformer": {"compression": {"rank": 128}},
    "performer": {"feature_map": {"samples": 128}},
    "flurka_performer": {"compression": {"rank": 128}, "feature_map": {"samples": 128}},
    "flurka_rnn": {"compression": {"rank": 128}},
    "flurka_eva": {"compression": {"rank": 128}},
}
"""128 features, landmarks or samples of each mechanism (*Skyformer*, section 5).

*FLuRKA* (table 3) follows that setup without naming a rank: Linformer's."""

ALL_SAMPLES = 10**9
"""More samples than any split has; a split is read at most once."""


def paper_attention(preset: str, config: Path) -> dict[str, Any]:
    """The preset with the sizes of the configuration's paper; unchanged if the paper says nothing about it."""
    setting, task = config.parent.name, config.stem
    if setting == "skyformer":
        return {"preset": preset, **FEATURES.get(preset, {})}
    samples = SAMPLES.get(task, {}) if setting == "kl" else {}
    number = samples.get("fastfood_rks" if preset == "fastfood_prf" else preset)
    return {"preset": preset} if number is None else {"preset": preset, "feature_map": {"samples": number}}


def overrides_of(config: Path, preset: str | None, seed: int, more: Sequence[str]) -> list[str]:
    """The overrides of one run. preset: None keeps the configured attention."""
    name = load(config, more).run.name
    keys = [f"run.name={name}-{preset or 'own'}-{seed}", f"run.seed={seed}"]
    if preset is not None:
        keys.append(f"model.attention={json.dumps(paper_attention(preset, config))}")
    return [*more, *keys]


def measure(config: Path, overrides: Sequence[str]) -> Evaluation:
    """Train a run to its last step and measure its best checkpoint."""
    folder = train_run(config, overrides)
    corpora = load(config, overrides).data.validation_corpora
    has_test = all("test" in Manifest.read(corpus.path).splits for corpus in corpora)
    split = "test" if has_test else "validation"
    return evaluate_run(folder, step=best_step(folder), samples=ALL_SAMPLES, split=split)


def scores_of(evaluation: Evaluation) -> dict[str, float]:
    """All scores of an evaluation, in the order of the table's columns."""
    accuracy = {} if evaluation.accuracy is None else {"accuracy": evaluation.accuracy}
    return {**accuracy, **(evaluation.scores or {}), "loss": evaluation.loss}


def row(name: str, evaluations: Sequence[Evaluation]) -> str:
    """The table row of a mechanism: means over its runs with sample standard deviations."""
    values = [scores_of(evaluation) for evaluation in evaluations]
    cells = [mean_and_deviation([one[key] for one in values]) for key in values[0]]
    steps = ", ".join(f"{evaluation.step:,}" for evaluation in evaluations)
    return table_row([f"`{name}`", len(evaluations), *cells, steps])


def mean_and_deviation(values: Sequence[float]) -> str:
    """Mean and sample standard deviation; of one value, the value."""
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}"


def page(command: str, config: Path, rows: Iterable[str], first: Evaluation) -> str:
    """The page: explanation and table."""
    columns = ["attention", "runs", *scores_of(first), "steps"]
    text = (
        f"Means over seeds, with sample standard deviations, on the {first.samples:,} samples of the {first.split} "
        "split; the checkpoint of each run that was best on the validation split."
    )
    return table_page(f"{config.parent.name}: {config.stem}", command, text, columns, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Train and measure every run and write the page."""
    parser = page_parser(__doc__)
    parser.add_argument("config", type=Path)
    add_preset_options(parser, None, "presets (default: the configuration's own)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default %(default)s)")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds} trains nothing; give 1 or more")
    rows, all_evaluations = [], []
    for preset in arguments.attention or [None]:
        runs = (
            overrides_of(arguments.config, preset, seed, arguments.overrides)
            for seed in range(arguments.seeds)
        )
        evaluations = [measure(arguments.config, overrides) for overrides in runs]
        all_evaluations += evaluations
        rows.append(row(preset or "as configured", evaluations))
        print(rows[-1], file=sys.stderr, flush=True)
    command = command_line("lra", argv)
    write_page(page(command, arguments.config, rows, all_evaluations[0]), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))

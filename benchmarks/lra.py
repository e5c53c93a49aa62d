"""A row of a table of the Long Range Arena, or of GLUE: each mechanism trained with several seeds, and tested.

    python -m benchmarks.lra configs/lra/kl/listops.yaml --attention softmax,fastfood_prf --seeds 3

Every run is `megakernel pretrain CONFIG` with model.attention, run.seed and run.name laid over it, in runs/. What was
stopped goes on where it was, what is done is read: start the same command again. Of the checkpoints that a run kept,
the one with the best validation accuracy is measured, on the test split where the data has one and else on the
validation split.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import add_out, ended, give, one_table, table_row
from benchmarks.trained import add_presets, best_step, trained
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
"""Random samples M by task (*Learning the Transformer Kernel*, table 7); fastfood_prf has what fastfood_rks has."""

FEATURES: dict[str, dict[str, Any]] = {
    "skyformer": {"skyformer": {"features": 128}},
    "nystromformer": {"nystromformer": {"landmarks": 128}},
    "linformer": {"compression": {"rank": 128}},
    "performer": {"feature_map": {"samples": 128}},
}
"""128 of what each mechanism counts (*Skyformer*, section 5)."""

EVERYTHING = 10**9
"""Samples; a split is read once at most."""


def attention(preset: str, config: Path) -> dict[str, Any]:
    """The preset as the paper of a configuration has it; as it is where the paper has nothing to say."""
    setting, task = config.parent.name, config.stem
    if setting == "skyformer":
        return {"preset": preset, **FEATURES.get(preset, {})}
    samples = SAMPLES.get(task, {}) if setting == "kl" else {}
    number = samples.get("fastfood_rks" if preset == "fastfood_prf" else preset)
    return {"preset": preset} if number is None else {"preset": preset, "feature_map": {"samples": number}}


def overrides_of(config: Path, preset: str | None, seed: int, more: Sequence[str]) -> list[str]:
    """The overrides of one run; preset None leaves the configured attention."""
    name = load(config, more).run.name
    keys = [f"run.name={name}-{preset or 'own'}-{seed}", f"run.seed={seed}"]
    if preset is not None:
        keys.append(f"model.attention={json.dumps(attention(preset, config))}")
    return [*more, *keys]


def measure(config: Path, overrides: Sequence[str]) -> Evaluation:
    """Train a run to its end, and measure its best checkpoint."""
    folder = trained(config, overrides)
    corpora = load(config, overrides).data.validation_corpora
    has_test = all("test" in Manifest.read(corpus.path).splits for corpus in corpora)
    split = "test" if has_test else "validation"
    return evaluate_run(folder, step=best_step(folder), samples=EVERYTHING, split=split)


def scores_of(found: Evaluation) -> dict[str, float]:
    """Everything that a table may hold, in its order."""
    accuracy = {} if found.accuracy is None else {"accuracy": found.accuracy}
    return {**accuracy, **(found.scores or {}), "loss": found.loss}


def row(name: str, found: Sequence[Evaluation]) -> str:
    """The line of a mechanism: means over its runs with sample standard deviations."""
    values = [scores_of(one) for one in found]
    cells = [spread([one[key] for one in values]) for key in values[0]]
    steps = ", ".join(f"{one.step:,}" for one in found)
    return table_row([f"`{name}`", len(found), *cells, steps])


def spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation; of one value, the value."""
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}"


def page(command: str, config: Path, rows: Iterable[str], first: Evaluation) -> str:
    """The table with what it was measured by."""
    columns = ["attention", "runs", *scores_of(first), "steps"]
    text = (
        f"Means over seeds, with sample standard deviations, on the {first.samples:,} samples of the {first.split} "
        "split; the checkpoint of each run that was best on the validation split."
    )
    return one_table(f"{config.parent.name}: {config.stem}", command, text, columns, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """0 where every run was trained and measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    add_presets(parser, None, "presets (default: the configuration's own)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default %(default)s)")
    add_out(parser)
    arguments = parser.parse_intermixed_args(argv)
    if arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds} trains nothing; give 1 or more")
    rows, all_found = [], []
    for preset in arguments.attention or [None]:
        keys = [
            overrides_of(arguments.config, preset, seed, arguments.overrides)
            for seed in range(arguments.seeds)
        ]
        found = [measure(arguments.config, of_seed) for of_seed in keys]
        all_found += found
        rows.append(row(preset or "as configured", found))
        print(rows[-1], file=sys.stderr, flush=True)
    command = f"python -m benchmarks.lra {' '.join(sys.argv[1:] if argv is None else argv)}"
    give(page(command, arguments.config, rows, all_found[0]), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))

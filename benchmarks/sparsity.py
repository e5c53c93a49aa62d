"""How fast each mechanism learns which pairs of a sequence count (*Learning the Transformer Kernel*, figure 6).

    python -m benchmarks.sparsity --attention softmax,gmm_rks,gmm_prf --out benchmarks/results/sparsity.md

Makes the data of each sparsity with `megakernel prepare --source sparsity:p=P`, trains each mechanism on it with
`megakernel pretrain benchmarks/sparsity.yaml`, and plots validation accuracy over steps. The same command again resumes
stopped runs and reads finished ones. The curves are written next to the page as CSV and PNG.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.page import command_line, docstring_parser, run_main, table_page, table_row, write_page
from benchmarks.training_runs import add_preset_options, metric_curve, run_megakernel, train_run
from megakernel.analysis.plots.table import Row, to_csv
from megakernel.config import Attention, expand_preset

CONFIG = Path(__file__).with_suffix(".yaml")
SPARSITIES = (0.1, 0.5, 0.9)
SAMPLES = 64
LEVELS = (0.2, 0.5, 0.9)
"""Accuracies whose first step is listed; chance is 1/9."""


@dataclass(frozen=True)
class LearningCurve:
    """One run's validation accuracy by step."""

    preset: str
    p: float
    accuracy: dict[int, float]

    def reaches(self, level: float) -> int | None:
        """The first measured step with at least this accuracy, or None."""
        return next((step for step, value in sorted(self.accuracy.items()) if value >= level), None)


def prepare_data(p: float, folder: Path, options: str) -> Path:
    """The prepared sequences of one sparsity."""
    out = folder / f"p{p}"
    source = f"sparsity:p={p}" + (f",{options}" if options else "")
    run_megakernel("prepare", "--source", source, "--tokenizer", "words", "--out", str(out))
    return out


def attention_of(preset: str) -> dict[str, object]:
    """The preset, with SAMPLES random samples if it has any."""
    attention = Attention.model_validate(expand_preset(preset))
    if attention.feature_map is None or not attention.feature_map.sample_count(head_dim=16):
        return {"preset": preset}
    return {"preset": preset, "feature_map": {"samples": SAMPLES}}


def train(preset: str, p: float, corpus: Path, more: Sequence[str]) -> LearningCurve:
    """Train one mechanism on one sparsity unless that is done, and read its curve."""
    tree = json.dumps(attention_of(preset))
    keys = [f"run.name={preset}-p{p}", f"data.train={corpus}", f"model.attention={tree}"]
    return LearningCurve(preset, p, metric_curve(train_run(CONFIG, [*more, *keys]), "eval/accuracy"))


def write_curves(curves: Sequence[LearningCurve], file: Path) -> None:
    """Write a CSV file with the columns p, preset, step and accuracy."""
    rows: list[Row] = [
        {"p": str(curve.p), "preset": curve.preset, "step": step, "accuracy": f"{value:.4f}"}
        for curve in curves
        for step, value in sorted(curve.accuracy.items())
    ]
    file.write_text(to_csv(rows), encoding="utf-8")


def draw_curves(curves: Sequence[LearningCurve], file: Path) -> None:
    """Plot a panel for each sparsity with a line for each mechanism."""
    from matplotlib.figure import Figure

    sparsities = sorted({curve.p for curve in curves})
    figure = Figure(figsize=(4.5 * len(sparsities), 3.5), layout="constrained")
    for p, axes in zip(sparsities, figure.subplots(1, len(sparsities), sharey=True, squeeze=False)[0]):
        for curve in (curve for curve in curves if curve.p == p):
            axes.plot(list(curve.accuracy), list(curve.accuracy.values()), label=curve.preset)
        axes.set(title=f"p = {p}", xlabel="step", ylim=(0, 1))
    first = figure.axes[0]
    first.set_ylabel("validation accuracy")
    first.legend()
    figure.savefig(file, dpi=120)


def page(command: str, curves: Sequence[LearningCurve]) -> str:
    """The page: explanation and table."""
    columns = ["p", "attention", *(f"steps to {level:.0%}" for level in LEVELS), "accuracy at the end"]
    rows = []
    for curve in curves:
        steps = [curve.reaches(level) for level in LEVELS]
        cells = ["never" if step is None else f"{step:,}" for step in steps]
        last = max(curve.accuracy)
        rows.append(
            table_row([curve.p, f"`{curve.preset}`", *cells, f"{curve.accuracy[last]:.4f} at {last:,}"])
        )
    text = (
        "Sequences of pairs, of which a share p counts; nine classes of equal size. Validation accuracy every "
        "`training.eval_every` steps; one seed."
    )
    return table_page("The sparsity task", command, text, columns, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Train every run and write the page and the curves."""
    parser = docstring_parser(__doc__)
    add_preset_options(parser, "softmax,gmm_rks,gmm_prf")
    parser.add_argument("--p", nargs="+", type=float, default=SPARSITIES, help="shares of pairs that count")
    parser.add_argument(
        "--data", type=Path, default=Path("data/sparsity"), help="where the sequences are kept"
    )
    parser.add_argument(
        "--options", default="", metavar="KEY=VALUE,...", help="options of the data, such as train=16000"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the page, beside which CSV and PNG are written"
    )
    arguments = parser.parse_intermixed_args(argv)
    curves = []
    for p in arguments.p:
        corpus = prepare_data(p, arguments.data, arguments.options)
        curves += [train(preset, p, corpus, arguments.overrides) for preset in arguments.attention]
    command = command_line("sparsity", argv)
    write_page(page(command, curves), arguments.out)
    write_curves(curves, arguments.out.with_suffix(".csv"))
    draw_curves(curves, arguments.out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))

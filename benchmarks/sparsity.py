"""How fast each mechanism learns which pairs of a sequence matter (*Learning the Transformer Kernel*, figure 6).

    python -m benchmarks.sparsity --attention softmax,gmm_rks,gmm_prf --out benchmarks/results/sparsity.md

Makes the data of each sparsity with `megakernel prepare --source sparsity:p=P` where it is not there yet, trains each
mechanism on each by `megakernel pretrain benchmarks/sparsity.yaml`, and draws validation accuracy over steps. What is
done is read, what was stopped goes on: start the same command again. Beside the page stand the curves as CSV and as
PNG.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.page import ended, give, one_table, table_row
from benchmarks.trained import add_presets, curve, megakernel, trained
from megakernel.analysis.plots.table import Row, to_csv
from megakernel.config import Attention, expand_preset

CONFIG = Path(__file__).with_suffix(".yaml")
SPARSITIES = (0.1, 0.5, 0.9)
SAMPLES = 64
LEVELS = (0.2, 0.5, 0.9)
"""Accuracies; a guess is right once in nine times."""


@dataclass(frozen=True)
class Learned:
    """One run's validation accuracy by step."""

    preset: str
    p: float
    accuracy: dict[int, float]

    def reaches(self, level: float) -> int | None:
        """The first measured step at which the accuracy is at least this; None for never."""
        return next((step for step, value in sorted(self.accuracy.items()) if value >= level), None)


def data(p: float, folder: Path, options: str) -> Path:
    """The prepared sequences of one sparsity."""
    out = folder / f"p{p}"
    source = f"sparsity:p={p}" + (f",{options}" if options else "")
    megakernel("prepare", "--source", source, "--tokenizer", "words", "--out", str(out))
    return out


def learn(preset: str, p: float, corpus: Path, more: Sequence[str]) -> Learned:
    """Train one mechanism on one sparsity, unless that is done."""
    form = Attention.model_validate(expand_preset(preset))
    tree: dict[str, object] = {"preset": preset}
    if form.feature_map is not None and form.feature_map.sample_count(head_dim=16):
        tree["feature_map"] = {"samples": SAMPLES}
    keys = [f"run.name={preset}-p{p}", f"data.train={corpus}", f"model.attention={json.dumps(tree)}"]
    return Learned(preset, p, curve(trained(CONFIG, [*more, *keys]), "eval/accuracy"))


def write_curves(found: Sequence[Learned], file: Path) -> None:
    """One line for each point: p, preset, step, accuracy."""
    rows: list[Row] = [
        {"p": str(one.p), "preset": one.preset, "step": step, "accuracy": f"{value:.4f}"}
        for one in found
        for step, value in sorted(one.accuracy.items())
    ]
    file.write_text(to_csv(rows), encoding="utf-8")


def draw_curves(found: Sequence[Learned], file: Path) -> None:
    """A picture for each sparsity side by side, a line for each mechanism."""
    from matplotlib.figure import Figure

    sparsities = sorted({one.p for one in found})
    figure = Figure(figsize=(4.5 * len(sparsities), 3.5), layout="constrained")
    for p, axes in zip(sparsities, figure.subplots(1, len(sparsities), sharey=True, squeeze=False)[0]):
        for one in (one for one in found if one.p == p):
            axes.plot(list(one.accuracy), list(one.accuracy.values()), label=one.preset)
        axes.set(title=f"p = {p}", xlabel="step", ylim=(0, 1))
    first = figure.axes[0]
    first.set_ylabel("validation accuracy")
    first.legend()
    figure.savefig(file, dpi=120)


def page(command: str, found: Sequence[Learned]) -> str:
    """The table with what it was measured by."""
    columns = ["p", "attention", *(f"steps to {level:.0%}" for level in LEVELS), "accuracy at the end"]
    rows = []
    for one in found:
        steps = [one.reaches(level) for level in LEVELS]
        cells = ["never" if step is None else f"{step:,}" for step in steps]
        last = max(one.accuracy)
        rows.append(table_row([one.p, f"`{one.preset}`", *cells, f"{one.accuracy[last]:.4f} at {last:,}"]))
    text = (
        "Sequences of pairs, of which a share p counts; nine classes of equal size. Validation accuracy, every "
        "`training.eval_every` steps; one seed."
    )
    return one_table("The sparsity task", command, text, columns, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """0 where every run was trained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_presets(parser, "softmax,gmm_rks,gmm_prf")
    parser.add_argument("--p", nargs="+", type=float, default=SPARSITIES, help="shares of pairs that count")
    parser.add_argument(
        "--data", type=Path, default=Path("data/sparsity"), help="where the sequences are kept"
    )
    parser.add_argument(
        "--options", default="", metavar="KEY=VALUE,...", help="of the sequences, such as train=16000"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the page, beside which CSV and PNG are written"
    )
    arguments = parser.parse_intermixed_args(argv)
    found = []
    for p in arguments.p:
        corpus = data(p, arguments.data, arguments.options)
        found += [learn(preset, p, corpus, arguments.overrides) for preset in arguments.attention]
    command = f"python -m benchmarks.sparsity {' '.join(sys.argv[1:] if argv is None else argv)}"
    give(page(command, found), arguments.out)
    write_curves(found, arguments.out.with_suffix(".csv"))
    draw_curves(found, arguments.out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))

"""Skyformer's figure 1 on a trained run: how far approximations are from softmax attention, by their features.

    megakernel prepare --source stdlib --tokenizer bpe:8192 --validation-fraction 0.1 --out data/stdlib-tenth
    megakernel pretrain benchmarks/uptraining.yaml --nproc 2
    python -m benchmarks.skyformer_error runs/uptraining/dense --out benchmarks/results/skyformer_error_cpu.md

The paper takes queries, keys and values of BERT before and after training on WikiText-2; here they are the run's own,
before and after it, on its validation text. `megakernel analyze --what spectral_error` does the same and draws it.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.page import add_out, give, opening
from megakernel.analysis.plots.run import analyze_run
from megakernel.analysis.plots.table import Row
from megakernel.checkpoint.trained_run import TrainedRun


def mean_error(rows: Sequence[Row], **where: object) -> float | None:
    """Over the layers; None where there is no such row."""
    found = [float(row["error"]) for row in rows if all(row[key] == value for key, value in where.items())]
    return fmean(found) if found else None


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """One for each kind of weights and each length; the best of a row in bold."""
    mechanisms = list(dict.fromkeys(str(row["mechanism"]) for row in rows))
    counts = sorted({row["features"] for row in rows})
    places = dict.fromkeys((str(row["weights"]), row["length"]) for row in rows)
    for weights, length in sorted(places):
        yield f"\n## {weights.capitalize()} weights, {length} tokens\n"
        yield f"| features | {' | '.join(mechanisms)} |"
        yield f"|---:|{'---:|' * len(mechanisms)}"
        for features in counts:
            where = {"weights": weights, "length": length, "features": features}
            errors = {name: mean_error(rows, mechanism=name, **where) for name in mechanisms}
            best = min(error for error in errors.values() if error is not None)
            yield f"| {features} | {' | '.join(_cell(error, best) for error in errors.values())} |"


def _cell(error: float | None, best: float) -> str:
    if error is None:
        return ""
    text = f"{error:.3f}" if error < 1000 else f"{error:.1e}"
    return f"**{text}**" if error == best else text


def summary(rows: Sequence[Row]) -> str:
    """What more features bring each approximation, over all weights and lengths."""
    mechanisms = dict.fromkeys(str(row["mechanism"]) for row in rows)
    lines = []
    for name in mechanisms:
        if name == "uniform":
            continue
        own = [row for row in rows if row["mechanism"] == name]
        few, many = min(r["features"] for r in own), max(r["features"] for r in own)
        pair = [mean_error(own, features=features) for features in (few, many)]
        assert pair[0] is not None
        assert pair[1] is not None
        lines.append(f"* {name}: {pair[0]:.3g} with {few} features, {pair[1]:.3g} with {many}.")
    return "\n".join(lines)


def page(run: Path, samples: int) -> str:
    """The whole page."""
    found = TrainedRun.find(run)
    model = found.config.model
    with tempfile.TemporaryDirectory() as folder:
        [result] = analyze_run(run, ["spectral_error"], samples=samples, out=Path(folder))
    head = [
        *opening(
            "Skyformer's figure 1 on a trained run",
            f"python -m benchmarks.skyformer_error {run} --samples {samples}",
            ", float64",
        ),
        f"Queries, keys and values of a {model.kind} of {model.num_layers} layers x {model.hidden_size} with "
        f"{model.num_heads} heads of width {model.head_size}, before training (*random*) and after "
        f"{found.checkpoint.step} steps (*trained*); samples of its validation text: {samples}. "
        "|O' - O|_2 / |O|_2 in spectral norms of a head's outputs, O of softmax attention that sees both ways; means "
        "over samples, heads and layers. *skyformer* approximates the softmax scores and their sums, as in the paper's "
        "figure; *uniform* is the mean of all values.",
        "",
        "Means over all weights and lengths:",
        "",
        summary(result.rows),
    ]
    return "\n".join([*head, *tables(result.rows), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run, such as runs/uptraining/dense")
    parser.add_argument("--samples", type=int, default=1, help="validation samples (default %(default)s)")
    add_out(parser)
    arguments = parser.parse_args()
    text = page(arguments.run, arguments.samples)
    give(text, arguments.out)


if __name__ == "__main__":
    main()

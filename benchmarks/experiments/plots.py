"""What stands next to a study's page: learning curves as CSV and PNG, and columns drawn against each other."""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megakernel.analysis.plots.table import Row, to_csv

from .runs import StudyResult
from .study import LoadedStudy

LARGEST_POINT = 400
"""Area of a scatter plot's largest point, in square points."""

Points = dict[str, tuple[float, float, float]]
"""Model -> x, y and size."""


def write_curves(results: Sequence[StudyResult], tag: str, page_file: Path) -> None:
    """Write the curves of a metric as CSV, and as PNG with a panel for each variant, next to the page.

    Of several seeds the PNG has the mean, in a band from the lowest to the highest.
    """
    rows: list[Row] = [
        {"variant": run.variant, "model": run.name, "seed": run.seed, "step": step, "value": value}
        for run, curve in ((result.run, result.curve(tag)) for result in results)
        for step, value in sorted(curve.items())
    ]
    page_file.with_suffix(".csv").write_text(to_csv(rows), encoding="utf-8")
    variants = sorted({result.run.variant for result in results})
    figure = Figure(figsize=(4.5 * len(variants), 3.5), layout="constrained")
    panels = figure.subplots(1, len(variants), sharey=True, squeeze=False)[0]
    for variant, axes in zip(variants, panels):
        for name, bands in curve_bands(results, tag, variant).items():
            steps = list(bands)
            mean, lowest, highest = zip(*bands.values())
            (line,) = axes.plot(steps, mean, label=name)
            axes.fill_between(steps, lowest, highest, color=line.get_color(), alpha=0.15, linewidth=0)
        axes.set(title=variant, xlabel="step")
    figure.axes[0].set_ylabel(tag)
    figure.axes[0].legend()
    figure.savefig(page_file.with_suffix(".png"), dpi=120)


def curve_bands(
    results: Sequence[StudyResult], tag: str, variant: str
) -> dict[str, dict[int, tuple[float, float, float]]]:
    """Model -> step -> mean, lowest and highest value over seeds, of the steps that all its seeds have."""
    curves: dict[str, list[dict[int, float]]] = {}
    for result in results:
        if result.run.variant == variant:
            curves.setdefault(result.name, []).append(result.curve(tag))
    bands = {}
    for name, of_seeds in curves.items():
        steps = sorted(set.intersection(*(set(curve) for curve in of_seeds)))
        values = {step: [curve[step] for curve in of_seeds] for step in steps}
        bands[name] = {step: (statistics.fmean(x), min(x), max(x)) for step, x in values.items()}
    return bands


def scatter_points(study: LoadedStudy, results: Sequence[StudyResult]) -> dict[str, Points]:
    """Variant -> the points of the study's `scatter`, means over seeds; a model without all three numbers is left out.

    Several variants are followed by their mean, of the models that are in all of them.
    """
    assert study.study.scatter is not None
    columns = [study.columns[title] for title in study.study.scatter.columns]
    panels: dict[str, Points] = {}
    for variant in dict.fromkeys(result.run.variant for result in results):
        points = panels[variant] = {}
        of_variant = [result for result in results if result.run.variant == variant]
        for name in dict.fromkeys(result.name for result in of_variant):
            of_seeds = [
                [column.value(result, results) for column in columns]
                for result in of_variant
                if result.name == name
            ]
            if any(not isinstance(value, int | float) for values in of_seeds for value in values):
                print(f"{name} {variant} is left out of the plot: it lacks a number", file=sys.stderr)
            elif study.study.scatter.inverse and not all(size for _, _, size in of_seeds):
                print(f"{name} {variant} is left out of the plot: 1 / 0 is no area", file=sys.stderr)
            else:
                points[name] = _mean(of_seeds)
    if len(panels) > 1:
        shared = set.intersection(*(set(points) for points in panels.values()))
        names = [name for name in next(iter(panels.values())) if name in shared]
        means = {name: _mean([points[name] for points in panels.values()]) for name in names}
        return {**panels, f"mean of {len(panels)}": means}
    return panels


def _mean(triples: Sequence[Sequence[Any]]) -> tuple[float, float, float]:
    x, y, size = (statistics.fmean(values) for values in zip(*triples))
    return x, y, size


def write_scatter(study: LoadedStudy, results: Sequence[StudyResult], page_file: Path) -> None:
    """Write `scatter_points` as PAGE_scatter.png: a panel for each variant, and the model's name at every point."""
    panels, scatter = scatter_points(study, results), study.study.scatter
    assert scatter is not None
    figure = Figure(figsize=(4.5 * len(panels), 3.5), layout="constrained")
    for (variant, points), axes in zip(panels.items(), figure.subplots(1, len(panels), squeeze=False)[0]):
        areas = {name: 1 / size if scatter.inverse else size for name, (_, _, size) in points.items()}
        largest = max(areas.values(), default=0.0) or 1.0  # all may be 0
        for name, (x, y, _) in points.items():
            axes.scatter([x], [y], s=LARGEST_POINT * areas[name] / largest, alpha=0.5)
            axes.annotate(name, (x, y), fontsize=6, ha="center")
        axes.set(title=variant, xlabel=scatter.x, ylabel=scatter.y)
        axes.margins(0.2)
    figure.suptitle(f"area: {'1 / ' if scatter.inverse else ''}{scatter.columns[2]}", fontsize=8)
    figure.savefig(page_file.with_name(f"{page_file.stem}_scatter.png"), dpi=120)

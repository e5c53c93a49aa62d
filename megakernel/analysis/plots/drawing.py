"""Plots of rows: lines, heat maps, and histograms, with a panel for each value of a column.

Figures do not use pyplot: they have no window and no global state.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .table import Plot, Row

WIDTH, HEIGHT = 3.2, 2.6
"""Size of a panel, in inches."""

COLUMNS = 4
"""Panels per row."""

LEGEND_LINES = 12
"""Maximum number of lines for which there is a legend."""


def figures(rows: Sequence[Row], plots: Iterable[Plot]) -> dict[str, Figure]:
    """Name -> figure, for plots that have a value to show."""
    result = {}
    for plot in plots:
        draw, value_index = _KINDS[plot.kind]
        shown = [row for row in rows if plot.first is None or row[plot.first] == rows[0][plot.first]]
        for name, part in _groups(shown, plot.each):
            if any(row[plot.columns[value_index]] != "" for row in part):
                title = plot.name or name.replace(" ", "_")
                result[title] = draw(part, *plot.columns, **plot.options)
                result[title].suptitle(title.replace("_", " "), fontsize=9)
    return result


def lines(
    rows: Sequence[Row],
    x: str,
    y: str,
    series: str | None = None,
    panel: str | None = None,
    *,
    log_x: bool = False,
    log_y: bool = False,
    steps: bool = False,
    means: bool = False,
) -> Figure:
    """A line for each value of `series`, a panel for each of `panel`; rows with equal x, line and panel are averaged.

    log_x: to base 2. steps: y is constant from its x to the next. means: the legend has each line's mean.
    """

    def draw(axes: Axes, of_panel: Sequence[Row]) -> None:
        groups = _groups(of_panel, series)
        for label, group in groups:
            points: dict[float, list[float]] = {}
            for row in group:
                if row[y] != "":
                    points.setdefault(float(row[x]), []).append(float(row[y]))
            places = sorted(points)
            heights = [fmean(points[place]) for place in places]
            text = f"{label}: {fmean(heights):.2f}" if means else label
            style = "steps-post" if steps else "default"
            axes.plot(places, heights, label=text, drawstyle=style, linewidth=1.2)
        if log_x:
            axes.set_xscale("log", base=2)
        if log_y:
            axes.set_yscale("log")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if series and len(groups) <= LEGEND_LINES:
            axes.legend(fontsize=6)

    return _panels(rows, panel, draw)


def cells(
    rows: Sequence[Row],
    x: str,
    y: str,
    value: str,
    panel: str | None = None,
    *,
    downwards: bool = False,
    decades: int | None = None,
    scale: tuple[float, float] | None = None,
) -> Figure:
    """A heat map of `value` over x and y, each in ascending order; a cell without a row is empty.

    downwards: y increases downward, like the rows of a matrix. decades: colors are logarithmic, over this many powers
    of ten below the largest value; cells of 0 or less are empty. scale: values of the first and the last color, so that
    plots of several checkpoints compare; None: the smallest and the largest value.
    """
    across, up = _values(rows, x), _values(rows, y)
    numbers = [float(row[value]) for row in rows if row[value] != ""]
    low, high = scale or ((min(numbers), max(numbers)) if numbers else (0.0, 1.0))
    colours = Normalize(low, high)
    if decades is not None:
        colours = LogNorm(max(high, 1e-30) * 10**-decades, max(high, 1e-30), clip=True)

    def draw(axes: Axes, of_panel: Sequence[Row]) -> None:
        grid = np.full((len(up), len(across)), np.nan)
        for row in of_panel:
            if row[value] != "":
                grid[up.index(row[y]), across.index(row[x])] = float(row[value])
        image = axes.imshow(
            grid,
            origin="upper" if downwards else "lower",
            aspect="auto",
            interpolation="none",
            norm=colours,
        )
        for axis, names in ((axes.xaxis, across), (axes.yaxis, up)):
            axis.set_major_locator(MaxNLocator(6, integer=True))
            axis.set_major_formatter(_tick_labels(names))
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.figure.colorbar(image, ax=axes, label=value)

    return _panels(rows, panel, draw)


def distributions(
    rows: Sequence[Row], value: str, series: str | None = None, panel: str | None = None
) -> Figure:
    """Histograms of `value`, one for each value of `series`."""
    numbers = [float(row[value]) for row in rows if row[value] != ""]
    edges = np.histogram_bin_edges(numbers, bins=20)

    def draw(axes: Axes, of_panel: Sequence[Row]) -> None:
        groups = _groups(of_panel, series)
        for label, group in groups:
            values = [float(row[value]) for row in group if row[value] != ""]
            axes.hist(values, bins=list(edges), histtype="step", label=label)
        axes.set_xlabel(value)
        axes.set_ylabel("count")
        if series and len(groups) <= LEGEND_LINES:
            axes.legend(fontsize=6)

    return _panels(rows, panel, draw)


def _tick_labels(values: Sequence[int | float | str]) -> Callable[[float, float], str]:
    """A tick formatter that maps an index to its value."""

    def name(place: float, _: float) -> str:
        index = round(place)
        return str(values[index]) if 0 <= index < len(values) else ""

    return name


def _groups(rows: Sequence[Row], column: str | None) -> list[tuple[str, list[Row]]]:
    """(label, rows) for each value of a column; all rows if `column` is None."""
    if column is None:
        return [("", list(rows))]
    return [
        (
            value if isinstance(value, str) else f"{column} {value}",
            [row for row in rows if row[column] == value],
        )
        for value in _values(rows, column)
    ]


def _values(rows: Sequence[Row], column: str) -> list[int | float | str]:
    values = list(dict.fromkeys(row[column] for row in rows))
    return values if any(isinstance(value, str) for value in values) else sorted(values, key=float)


def _panels(rows: Sequence[Row], panel: str | None, draw: Callable[[Axes, Sequence[Row]], None]) -> Figure:
    groups = _groups(rows, panel)
    columns = min(COLUMNS, len(groups))
    down = math.ceil(len(groups) / columns)
    figure = Figure(figsize=(max(WIDTH * columns, 4.5), HEIGHT * down), layout="constrained")
    all_axes = figure.subplots(down, columns, squeeze=False).flatten()
    for axes, (name, group) in zip(all_axes, groups):
        draw(axes, group)
        axes.set_title(name, fontsize=8)
    for axes in all_axes[len(groups) :]:
        axes.set_visible(False)
    return figure


_KINDS: dict[str, tuple[Callable[..., Figure], int]] = {
    "lines": (lines, 1),
    "cells": (cells, 2),
    "distributions": (distributions, 0),
}
"""Kind of plot -> its function, and the index of the value's column in `Plot.columns`."""

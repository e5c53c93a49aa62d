"""Plots from rows: lines, maps of cells, and distributions, with a panel for each value of some columns.

Figures belong to no window and to no global state of matplotlib.
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
"""Panels beside each other."""

MOST_NAMED = 12
"""Lines that a legend names."""


def figures(rows: Sequence[Row], plots: Iterable[Plot]) -> dict[str, Figure]:
    """Name -> figure, of those plots that have a value to show."""
    found = {}
    for plot in plots:
        draw, place = _KINDS[plot.kind]
        own = [row for row in rows if plot.first is None or row[plot.first] == rows[0][plot.first]]
        for name, part in _groups(own, plot.each):
            if any(row[plot.columns[place]] != "" for row in part):
                found[plot.name or name.replace(" ", "_")] = draw(part, *plot.columns, **plot.options)
    return found


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
    """A line for each value of `series`, a panel for each of `panel`; rows that share x, line and panel are averaged.

    log_x: to base 2. steps: y holds from its x to the next. means: the legend tells each line's mean.
    """

    def draw(axes: Axes, of_panel: Sequence[Row]) -> None:
        groups = _groups(of_panel, series)
        for label, own in groups:
            points: dict[float, list[float]] = {}
            for row in own:
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
        if series and len(groups) <= MOST_NAMED:
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
) -> Figure:
    """A map of `value` over the places x and y, whole numbers or sizes in ascending order; no row: an empty cell.

    downwards: y grows to the bottom, as rows of a matrix do. decades: colours follow the logarithm, over so many powers
    of ten below the largest value; cells of 0 and less are empty.
    """
    across, up = _values(rows, x), _values(rows, y)
    numbers = [float(row[value]) for row in rows if row[value] != ""]
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
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
            axis.set_major_formatter(_names_of(names))
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
        for label, own in groups:
            found = [float(row[value]) for row in own if row[value] != ""]
            axes.hist(found, bins=list(edges), histtype="step", label=label)
        axes.set_xlabel(value)
        axes.set_ylabel("count")
        if series and len(groups) <= MOST_NAMED:
            axes.legend(fontsize=6)

    return _panels(rows, panel, draw)


def _names_of(values: Sequence[int | float | str]) -> Callable[[float, float], str]:
    """The value of a row or column of cells as the text of its tick."""

    def name(place: float, _: float) -> str:
        index = round(place)
        return str(values[index]) if 0 <= index < len(values) else ""

    return name


def _groups(rows: Sequence[Row], column: str | None) -> list[tuple[str, list[Row]]]:
    """The rows of each value of a column under its name; all of them without a column."""
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
    found = list(dict.fromkeys(row[column] for row in rows))
    return found if any(isinstance(value, str) for value in found) else sorted(found, key=float)


def _panels(rows: Sequence[Row], panel: str | None, draw: Callable[[Axes, Sequence[Row]], None]) -> Figure:
    groups = _groups(rows, panel)
    columns = min(COLUMNS, len(groups))
    down = math.ceil(len(groups) / columns)
    figure = Figure(figsize=(max(WIDTH * columns, 4.5), HEIGHT * down), layout="constrained")
    all_axes = figure.subplots(down, columns, squeeze=False).flatten()
    for axes, (name, own) in zip(all_axes, groups):
        draw(axes, own)
        axes.set_title(name, fontsize=8)
    for axes in all_axes[len(groups) :]:
        axes.set_visible(False)
    return figure


_KINDS: dict[str, tuple[Callable[..., Figure], int]] = {
    "lines": (lines, 1),
    "cells": (cells, 2),
    "distributions": (distributions, 0),
}
"""Function by kind of plot, and the place of the column with values among its arguments."""

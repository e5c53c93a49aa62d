"""The page of a study: its text, table, models and correlations."""

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.page import table_page, table_row

from .measures import Value
from .runs import StudyResult, StudyRun
from .study import LoadedStudy


def page(study: LoadedStudy, results: Sequence[StudyResult], command: str) -> str:
    """The page of all results; columns without a value in any row are left out."""
    groups = _groups(study, results)
    for title in reversed(study.study.sort):
        column = study.columns[title.removeprefix("-")]
        largest_first = title.startswith("-")
        groups.sort(key=lambda group: _order(column.value(group[0], results), largest_first))
    shown = [
        title
        for title, column in study.columns.items()
        if any(column.value(result, results) is not None for result in results)
    ]
    for title, column in study.columns.items():
        if title not in shown and not column.optional:
            print(f"column {title} is left out: no model of the page has a value", file=sys.stderr)
    lines = [result_row(study, group, results, shown) for group in groups]
    dtype, nproc = results[0].config.training.dtype, results[0].nproc
    details = f", {dtype}" + (f", {nproc} processes" if nproc > 1 else "")
    if results[0].config.training.device != "cpu" and torch.cuda.is_available():
        details += f", {torch.cuda.get_device_name()}"
    text = results[0].run.fill(study.study.text, **text_names(results[0].run)).strip()
    table = table_page(study.study.title, command, text, shown, lines, details)
    return "\n".join([table, *_model_lines(results), *correlation_lines(study, results), ""])


def result_row(
    study: LoadedStudy,
    group: Sequence[StudyResult],
    results: Sequence[StudyResult],
    shown: Sequence[str] | None = None,
) -> str:
    """The table row of a model, with one result for each seed that it averages; shown: its columns."""
    columns = (study.columns[title] for title in shown or study.columns)
    return table_row(column.mean([column.value(result, results) for result in group]) for column in columns)


def text_names(run: StudyRun) -> dict[str, Any]:
    """What `{names}` stand for in the study's text besides those of the run."""
    config, start = run.config, run.start
    names = {**dict(config), "tokens": config.training.consumed(config.training.steps)[1]}
    if start is not None:
        steps = start.config.training.steps
        names |= {"start": start.config, "start_tokens": start.config.training.consumed(steps)[1]}
    return names


def _groups(study: LoadedStudy, results: Sequence[StudyResult]) -> list[list[StudyResult]]:
    """The results of each row."""
    if not study.study.mean_over_seeds:
        return [[result] for result in results]
    groups: dict[tuple[str, str], list[StudyResult]] = {}
    for result in results:
        groups.setdefault((result.run.variant, result.name), []).append(result)
    return list(groups.values())


def _order(value: Value, largest_first: bool) -> tuple[int, Any]:
    """Numbers before text, and empty cells last."""
    if isinstance(value, bool | int | float):
        return 0, -value if largest_first else value
    return (2, 0) if value is None else (1, value)


def _model_lines(results: Sequence[StudyResult]) -> list[str]:
    """The overrides of each model that is more than a preset of its name."""
    models = {result.run.name: result.run for result in results}
    lines = []
    for name, run in sorted(models.items()):
        keys = run.study.model_overrides(name, run.variant)
        if keys and name in run.study.study.models:
            overrides = " ".join(
                f"{key}={value if isinstance(value, str) else json.dumps(value)}"
                for key, value in keys.items()
            )
            lines.append(f"* `{name}`: `{overrides}`")
    return lines


LEAST_CORRELATED = 3
"""Fewest runs of which R² says something: two points are always on a line."""


def correlation_lines(study: LoadedStudy, results: Sequence[StudyResult]) -> list[str]:
    """R² of each pair of the study's `correlations`, over the runs of each variant that have both numbers."""
    lines = []
    for first, second in study.study.correlations:
        for variant in dict.fromkeys(result.run.variant for result in results):
            of_variant = [result for result in results if result.run.variant == variant]
            columns = [study.columns[title] for title in (first, second)]
            pairs = [[column.value(result, results) for column in columns] for result in of_variant]
            points = [
                (float(x), float(y))
                for x, y in pairs
                if isinstance(x, int | float) and isinstance(y, int | float)
            ]
            name = f"* R² of *{first}* and *{second}* over {len(points)} runs"
            lines.append(f"{name}{f' of {variant}' if variant else ''}: {_squared_correlation(points)}")
    return lines


def _squared_correlation(points: Sequence[tuple[float, float]]) -> str:
    if len(points) < LEAST_CORRELATED:
        return f"none, which takes {LEAST_CORRELATED} runs"
    xs, ys = zip(*points)
    if len(set(xs)) == 1 or len(set(ys)) == 1:
        return "none, because one of them is the same everywhere"
    return f"{statistics.correlation(xs, ys) ** 2:.2f}"

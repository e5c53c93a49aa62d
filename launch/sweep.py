"""`megakernel sweep`: a grid of configurations as one job array."""

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

from launch.shipped import config_file
from launch.slurm.options import add_cluster_options, cluster_of
from launch.submit import add_job_options, carry_out, indices, training_request
from megakernel.config import Config, UserError, load, yaml_text

HELP = "train every point of a grid of configurations, as one job array"
EXAMPLE = "megakernel sweep lr.yaml --array %4 -G 8 -t 2:00:00"
NEEDS = ("submitit",)

_EXAMPLE_FILE = """\
a sweep file:
  config: configs/demo.yaml
  name: lr                        # runs are lr-0, lr-1 ...
  grid:
    optimizer.lr: [1e-3, 3e-3]    # the last key varies fastest
    model.attention: [flurka, softmax]"""

MAX_POINTS = 100_000
"""Most points of a grid; `--array` chooses those of one submission."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = f"{parser.epilog}\n\n{_EXAMPLE_FILE}"
    parser.add_argument("sweep", metavar="SWEEP.yaml", type=Path, help="config, name and grid, as below")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="keys to change in all points"
    )
    add_cluster_options(parser)
    parser.add_argument(
        "--array", metavar="[SPEC]%K", help="points to run, at most K at a time (default: all)"
    )
    add_job_options(parser)


def run(args: argparse.Namespace) -> int:
    """Check every point, then submit all."""
    tree = _read(args.sweep)
    points = _assignments(tree["grid"])
    chosen, percent, limit = (args.array or "").partition("%")
    array = (chosen or f"0-{len(points) - 1}") + percent + limit
    selected = indices(array)
    missing = [index for index in selected if index >= len(points)]
    if missing:
        raise UserError(
            f"--array {args.array} asks for point {missing[0]}; the grid has 0 to {len(points) - 1}"
        )
    for override in args.overrides:
        if override.partition("=")[0] in ("run.name", *tree["grid"]):
            raise UserError(f"{override} is set by {args.sweep}; change it there")
    common = [*args.overrides, f"run.name={tree['name']}"]
    config = config_file(tree["config"])
    runs: dict[int | None, Config] = {index: load(config, [*common, *points[index]]) for index in selected}
    request = training_request(runs, cluster_of(args), array, dependency=args.dependency)
    if not (args.json or args.dry_run):
        for index in selected:
            print(f"{runs[index].run.folder}-{index}: {' '.join(points[index])}", flush=True)
    return carry_out(request, args)


def _read(path: Path) -> dict[str, Any]:
    tree = yaml_text.read(path)
    grid = tree.get("grid")
    if set(tree) != {"config", "name", "grid"} or not isinstance(grid, dict) or not grid:
        raise UserError(f"{path} is no sweep; give it config, name and grid, as in megakernel sweep --help")
    for key in ("config", "name"):
        if not isinstance(tree[key], str):
            raise UserError(f"{path}: {key}={tree[key]!r} is no text; write it in quotes")
    if "run.name" in grid:
        raise UserError(
            f"{path}: grid.run.name={grid['run.name']!r} is set by name; leave it out of the grid"
        )
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}: grid.{key}={values!r} is no list of values; write [A, B]")
        texts = [_as_yaml(value) for value in values]
        if repeated := next((text for text in texts if texts.count(text) > 1), None):
            raise UserError(
                f"{path}: grid.{key} has {repeated} twice, which would be two equal runs; leave one out"
            )
    if (points := math.prod(map(len, grid.values()))) > MAX_POINTS:
        raise UserError(f"{path}: grid has {points:,} points; leave at most {MAX_POINTS:,}")
    return tree


def _assignments(grid: dict[str, list[Any]]) -> list[list[str]]:
    """The overrides of each point."""
    return [
        [f"{key}={_as_yaml(value)}" for key, value in zip(grid, values)]
        for values in itertools.product(*grid.values())
    ]


def _as_yaml(value: Any) -> str:
    # JSON is YAML, except for nan and infinity.
    return value if isinstance(value, str) else json.dumps(value)

"""`megakernel compare`: runs side by side, as tables and as one picture."""

import argparse
import json
import string
import textwrap
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.arguments import add_root_argument
from launch.found_runs import find
from launch.messages import printable
from launch.run_status import line_width
from megakernel.config import UserError
from megakernel.config.errors import report_write_errors
from megakernel.config.extras import lacking
from megakernel.training.observing.console import decimal

if TYPE_CHECKING:
    from megakernel.analysis.comparison import RunComparison

HELP = "compare runs: keys that differ, losses at equal tokens and at equal time, evaluations, one picture"
EXAMPLE = "megakernel compare first sharded"

_HOW_READ = "train: mean over a tenth of the shortest run; eval: between its neighbours"
_TOKENIZERS_DIFFER = (
    "tokenizers differ, so losses per token do not compare: bits per byte of the validation samples"
)

_WIDTH = 80
"""Characters per line if stdout is no terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folders of runs, or names under --root; an up-training: its stages",
    )
    add_root_argument(parser)
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="the picture, a PNG file (default: in the first run's folder, comparison/OTHERS.png; with --json none)",
    )
    add("--json", action="store_true", help="print JSON instead of tables; a picture only with --out")


def run(args: argparse.Namespace) -> int:
    """Print the comparison, and draw its picture if matplotlib is installed."""
    folders = [folder for text in args.runs for folder in find(text, args.root)]
    seen: dict[Path, Path] = {}
    for folder in folders:
        if (same := seen.setdefault(folder.resolve(), folder)) is not folder:
            raise UserError(f"{same} is given twice; give runs that differ")
    if len(folders) < 2:
        raise UserError(f"{folders[0]} alone compares with nothing; name a second run")
    if len(folders) > len(string.ascii_uppercase):
        raise UserError(f"{len(folders)} runs are too many for one table; give at most 26")
    if args.out is not None and args.out.suffix.lower() != ".png":
        raise UserError(f"--out {args.out} is no PNG file; give a name that ends in .png")
    from megakernel.analysis.comparison import ComparedRun, RunComparison

    names = [
        str(folder.relative_to(args.root)) if folder.is_relative_to(args.root) else str(folder)
        for folder in folders
    ]
    comparison = RunComparison([ComparedRun.read(folder) for folder in folders])
    if args.json:
        drawn = None if args.out is None else str(_draw(comparison, names, args.out)[0])
        print(json.dumps(comparison.as_dict() | {"picture": drawn}, indent=1))
        return 0
    picture, why_not = _draw(comparison, names, args.out)
    width = line_width() or _WIDTH
    for line in _lines(comparison, names, width):
        print(printable(line))
    print(f"\npicture: {picture}" if picture is not None else f"\n{why_not}")
    return 0


def _draw(comparison: "RunComparison", names: Sequence[str], out: Path | None) -> tuple[Path | None, str]:
    """The file of the picture, or why there is none."""
    if not comparison.tags:
        return None, "no picture: no run has logged a loss yet"
    if (line := lacking("the picture is left out: it", "matplotlib")) is not None:
        if out is not None:
            raise UserError(line)
        return None, line
    from megakernel.evaluation.records import file_name

    others = file_name(" ".join(name.replace("/", "-") for name in names[1:]))
    file = out or comparison.runs[0].folder / "comparison" / f"{others}.png"
    with report_write_errors("--out", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        comparison.figure(names).savefig(file, dpi=120)
    return file, ""


def _lines(comparison: "RunComparison", names: Sequence[str], width: int) -> Iterator[str]:
    labels = string.ascii_uppercase[: len(names)]
    ends = [f"step {run.step:,}, {run.tokens:,} tokens, {_time(run.seconds)}" for run in comparison.runs]
    for label, name, end in zip(labels, names, ends):
        yield f"{label}  {name}: {end}"
    yield "\nkeys that differ:" if comparison.differing else "\nno key differs"
    for key, values in comparison.differing:
        texts = [f"{label} {_text(value)}" for label, value in zip(labels, values)]
        yield from _fitting(f"  {key}  ", texts, width)
    if not comparison.has_one_tokenizer:
        yield ""
        yield from textwrap.wrap(_TOKENIZERS_DIFFER, width)
    for axis, title, shown in (
        ("tokens", "tokens", lambda place: f"{place:,.0f}"),
        ("seconds", "time of training steps", _time),
    ):
        rows = comparison.at_equal(axis)
        if not rows:
            silent = [name for name, run in zip(names, comparison.runs) if not getattr(run, axis)]
            yield f"\nno losses at equal {title}: {', '.join(silent)} has logged no step yet"
            continue
        yield f"\nlosses at equal {title}:"
        cells = [["", "", *(shown(place) for place, _ in rows)]]
        for number, label in enumerate(labels):
            for tag in comparison.tags:
                values = [_number(values[number][tag]) for _, values in rows]
                cells.append([label, tag.replace("/", " ").replace("_", " "), *values])
        yield from _table(cells)
        yield from textwrap.wrap(f"  {_HOW_READ}", width, subsequent_indent="  ")
    if comparison.evaluations:
        yield "\nevaluations (megakernel evaluate), newest step of each run:"
    for task, results in comparison.evaluations.items():
        yield f"  {task}"
        steps = ["" if one is None else f"step {one[0]:,}" for one in results]
        metrics = dict.fromkeys(name for one in results if one is not None for name in one[1])
        for name in ("", *metrics):
            values = steps if not name else [_number(one[1].get(name) if one else None) for one in results]
            texts = [f"{label} {value or '-'}" for label, value in zip(labels, values)]
            yield from _fitting(f"    {name:<16}", texts, width)


def _fitting(start: str, texts: Sequence[str], width: int) -> Iterator[str]:
    """One line if it fits, else a line, or a wrapped one, for each text."""
    line = start + "  ".join(texts)
    if len(line) <= width:
        yield line
        return
    yield start.rstrip()
    for text in texts:
        yield from textwrap.wrap(text, max(width, 24), initial_indent="      ", subsequent_indent="        ")


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        left = f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}"
        yield "  ".join([left, *(f"{cell:>{size}}" for cell, size in zip(row[2:], widths[2:]))]).rstrip()


def _text(value: Any) -> str:
    """A value of the configuration in one line, sections without what is null."""
    if isinstance(value, dict):
        kept = (f"{key}: {_text(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(kept)}}}"
    return value if isinstance(value, str) else json.dumps(value)


def _number(value: float | None) -> str:
    return "-" if value is None else decimal(value)


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if seconds >= 60 else f"{seconds:.2f} s"

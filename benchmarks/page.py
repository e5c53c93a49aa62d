"""The frame of a page of results: title, command, machine, tables, and the file that it is written to."""

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path

import torch

from megakernel.config import UserError


def processor() -> str:
    """The name that the CPU reports."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def description() -> str:
    """Processor, threads and versions."""
    return (
        f"{processor()}, {torch.get_num_threads()} thread(s) of {os.cpu_count()} cores, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def opening(title: str, command: str, more: str = "") -> list[str]:
    """The first lines of a page: its title, the command, the day, the machine, and what more decides the numbers."""
    return [f"# {title}", "", f"`{command}`, {date.today().isoformat()}, {description()}{more}.", ""]


def typed(module: str, arguments: Sequence[str]) -> str:
    """The command that runs a benchmark in one thread, as a shell takes it."""
    return f"OMP_NUM_THREADS=1 {shlex.join(['python', '-m', f'benchmarks.{module}', *arguments])}"


def table_row(cells: Iterable[object]) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(columns: Sequence[str], rows: Iterable[str], numbers: bool = False) -> list[str]:
    """The lines of a table and an empty one; numbers: all columns but the first are aligned to the right."""
    rule = table_row(["---", *["---:"] * (len(columns) - 1)]) if numbers else "|---" * len(columns) + "|"
    return [table_row(columns), rule, *rows, ""]


def one_table(
    title: str, command: str, text: str, columns: Sequence[str], rows: Iterable[str], more: str = ""
) -> str:
    """A page of one table, behind what it was measured by; more: as of `opening`."""
    return "\n".join([*opening(title, command, more), text, "", *table(columns, rows)])


def ended(main: Callable[[], int]) -> int:
    """The exit status of a program: what `main` gives; 2, behind one line, where something has to change."""
    try:
        return main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def whole_help(text: str) -> argparse.ArgumentParser:
    """A parser whose help shows a module's docstring as it stands."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_out(parser: argparse.ArgumentParser) -> None:
    """Declare --out."""
    parser.add_argument("--out", type=Path, help="where the page is written; it is printed otherwise")


def give(text: str, out: Path | None) -> None:
    """Write the page to `out`, whose folder is made, or print it."""
    if out is None:
        print(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")

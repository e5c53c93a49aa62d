"""Pages of results: title, command, machine, tables, and writing them to a file."""

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path

import torch

from megakernel.config import RunFailed, UserError


def processor() -> str:
    """The CPU's model name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def machine_description() -> str:
    """The CPU, its threads, and the versions of torch and Python."""
    return (
        f"{processor()}, {torch.get_num_threads()} thread(s) of {os.cpu_count()} cores, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def page_header(title: str, command: str, details: str = "") -> list[str]:
    """The first lines of a page: title, command, date, machine. details: anything else that affects the numbers."""
    return [
        f"# {title}",
        "",
        f"`{command}`, {date.today().isoformat()}, {machine_description()}{details}.",
        "",
    ]


def command_line(module: str, arguments: Sequence[str] | None = None) -> str:
    """The shell command that runs a benchmark with these arguments; None: those of this process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", f"benchmarks.{module}", *arguments])
    # Without the variable, the runs that a benchmark starts share the cores; with it, each would take as many.
    threads = os.environ.get("OMP_NUM_THREADS")
    return f"OMP_NUM_THREADS={threads} {command}" if threads else command


def table_row(cells: Iterable[object]) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(columns: Sequence[str], rows: Iterable[str], numbers: bool = False) -> list[str]:
    """The lines of a table and an empty line. numbers: right-align all columns but the first."""
    rule = table_row(["---", *["---:"] * (len(columns) - 1)]) if numbers else "|---" * len(columns) + "|"
    return [table_row(columns), rule, *rows, ""]


def table_page(
    title: str, command: str, text: str, columns: Sequence[str], rows: Iterable[str], details: str = ""
) -> str:
    """A page with one table below its explanatory text; details: as of `page_header`."""
    return "\n".join([*page_header(title, command, details), text, "", *table(columns, rows)])


def run_main(main: Callable[[], int]) -> int:
    """Run `main` and return its exit status; print a UserError (2) or a RunFailed (1) as one line."""
    try:
        return main()
    except (UserError, RunFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1


def docstring_parser(text: str) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring, unformatted."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def page_parser(text: str) -> argparse.ArgumentParser:
    """`docstring_parser` with --out."""
    parser = docstring_parser(text)
    parser.add_argument("--out", type=Path, help="file for the page (default: print it)")
    return parser


def write_page(text: str, out: Path | None) -> None:
    """Write the page to `out`, creating its folder, or print it."""
    if out is None:
        print(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")

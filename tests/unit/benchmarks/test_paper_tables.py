"""The list of the papers' tables and figures in docs/benchmarks.md: complete, and what it names exists and loads.

tests/unit/benchmarks/test_experiments.py loads the runs of every study that a page names.
"""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.kernels.attention.suites import SUITES
from launch.cli import main
from megakernel.analysis.plots.catalogue import ANALYSES
from megakernel.config import load
from megakernel.evaluation.run import parse as parse_tasks

ROOT = Path(__file__).parents[3]
# Paper -> its tables and figures, appendices included.
PAPERS = {
    "Learning the Transformer Kernel": (14, 10),
    "Skyformer": (3, 4),
    "Transformer-MGK": (10, 16),
    "FLuRKA": (6, 5),
}
STATES = {"made here", "can be made", "made smaller", "not made"}


class Entry(NamedTuple):
    """A row of the list."""

    paper: str
    item: str
    shows: str
    state: str
    made_with: str
    remark: str


def entries():
    """The rows below the headings of the papers."""
    text = (ROOT / "docs" / "benchmarks.md").read_text().partition("## Every table and figure")[2]
    parts = re.split(r"^### (.+)$", text, flags=re.MULTILINE)
    for paper, part in zip(parts[1::2], parts[2::2]):
        for line in re.findall(r"^\| (?:table|figure) .*$", part, flags=re.MULTILINE):
            yield Entry(paper, *(cell.strip() for cell in line.strip("|").split("|")))


ENTRIES = list(entries())
CODE = [
    code
    for entry in ENTRIES
    for cell in (entry.made_with, entry.remark)
    for code in re.findall("`([^`]+)`", cell)
]


def commands(start):
    """The commands that begin so, without these words and each once."""
    found = dict.fromkeys(code.removeprefix(start).strip() for code in CODE if code.startswith(start))
    assert found, f"no command begins with {start}"
    return list(found)


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_is_listed_once_and_in_order(paper):
    tables, figures = PAPERS[paper]
    expected = [f"figure {number}" for number in range(1, figures + 1)]
    expected += [f"table {number}" for number in range(1, tables + 1)]
    assert [entry.item for entry in ENTRIES if entry.paper == paper] == expected


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.paper}: {entry.item}")
def test_a_row_says_what_makes_it_or_why_nothing_does(entry):
    assert entry.state in STATES
    assert entry.shows
    if entry.state == "not made":
        assert not entry.made_with
        assert entry.remark
    else:
        assert "`" in entry.made_with or "the page of table" in entry.made_with
    if entry.state == "made smaller":
        assert "](" in entry.made_with, "the page with what was measured"
        assert entry.remark


@pytest.mark.parametrize("path", dict.fromkeys(re.findall(r"configs/[\w/-]+\.yaml", " ".join(CODE))))
def test_a_configuration_of_the_list_loads(path):
    assert load(ROOT / path).training.steps > 0


@pytest.mark.parametrize("command", commands("megakernel pretrain"))
def test_a_training_of_the_list_loads_with_its_overrides(command):
    path, *overrides = shlex.split(command)
    assert load(ROOT / path, overrides).training.steps > 0


@pytest.mark.parametrize("command", commands("python -m benchmarks."))
def test_a_program_of_the_list_exists(command):
    module, *arguments = command.split()
    assert find_spec(f"benchmarks.{module}") is not None
    if "--suite" in arguments:
        assert arguments[arguments.index("--suite") + 1] in SUITES


@pytest.mark.parametrize("command", commands("megakernel analyze RUN --what"))
def test_an_analysis_of_the_list_exists(command):
    names = shlex.split(command.partition(" --")[0])
    assert set(names) <= set(ANALYSES)


@pytest.mark.parametrize("command", commands("megakernel evaluate RUN"))
def test_an_evaluation_of_the_list_is_a_task(command):
    assert parse_tasks([shlex.split(command)[-1]])


@pytest.mark.parametrize("command", commands("megakernel dev"))
def test_a_development_command_of_the_list_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["dev", *command.split(), "--help"])
    assert ended.value.code == 0
    assert "example:" in capsys.readouterr().out


def test_every_analysis_is_at_the_figures_and_tables_that_it_names():
    """`megakernel analyze --help` and the list agree."""
    for analysis in ANALYSES.values():
        for source in analysis.source.split("; "):
            paper, _, places = source.partition(", ")
            for kind, first, rest in re.findall(r"(table|figure)s? (\d+)((?:, \d+|[-–]\d+)*)", places):
                numbers = [int(first)]
                for mark, number in re.findall(r"(, |[-–])(\d+)", rest):
                    numbers += [int(number)] if mark == ", " else range(numbers[-1] + 1, int(number) + 1)
                for number in numbers:
                    [entry] = [x for x in ENTRIES if (x.paper, x.item) == (paper, f"{kind} {number}")]
                    words = [
                        word for code in re.findall("`([^`]+)`", entry.made_with) for word in code.split()
                    ]
                    assert analysis.name in words, f"{analysis.name} is not at {paper}, {kind} {number}"

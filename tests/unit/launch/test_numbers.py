"""Every numeric option of every command refuses absurd values, options added later included."""

import argparse

import pytest

from launch.arguments import Number, NumberParser
from launch.cli import COMMANDS

from ..config import trees

ABSURD = ("nan", "inf", "-inf", "true", "1e300", "-1e300", "1e-300", "1" + "0" * 300, "9" * 5000, "", "1,5")


def _numeric_options():
    for command, module in COMMANDS.items():
        parser = NumberParser(prog=command)
        module.add_arguments(parser)
        for action in parser._actions:
            if action.type in (int, float) or isinstance(action.type, Number):
                yield pytest.param(
                    parser, action.option_strings[-1], id=f"{command} {action.option_strings[-1]}"
                )


@pytest.mark.parametrize(("parser", "option"), _numeric_options())
def test_no_option_takes_an_absurd_number(parser, option, capsys):
    for text in ABSURD:
        with pytest.raises(SystemExit):
            parser.parse_args([f"{option}={text}"])
        line = capsys.readouterr().err.splitlines()[-1]
        assert option in line
        assert "; give " in line
        assert len(line) < 250


def test_the_numeric_options_of_all_commands_are_found():
    found = {parameter.id for parameter in _numeric_options()}
    assert len(found) >= 25
    assert found >= {
        "monitor --every",
        "plan --network",
        "generate --seed",
        "submit --chain",
        "prepare --workers",
    }


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (["monitor", "--every", "nan"], "--every: nan is out of range; give a finite number of at most 86,400"),
        (["submit", "x", "--chain", "1000000"], "--chain: 1000000 is out of range; give an integer of at least 1"),
        (["plan", "x", "--network", "nan"], "--network: nan is out of range; give a finite number of at least 0.001"),
        (["generate", "x", "--prompt", "", "--seed", "1e24"], "argument --seed: 1e24 is not an integer; give"),
        (["generate", "x", "--prompt", "", "--seed", "1" + "0" * 24], "is beyond 64 bits; give an integer"),
    ],
)  # fmt: skip
def test_an_invalid_number_is_refused_in_one_line(typed, line, refused):
    assert line in refused(*typed)


def test_a_sweep_counts_its_grid_before_expanding_it(tmp_path, refused):
    values = list(range(1, 1001))
    (tmp_path / "sweep.yaml").write_text(
        f"config: {trees.file(tmp_path)}\nname: x\ngrid: {{training.steps: {values}, run.seed: {values}, a: {values}}}"
    )
    error = refused("sweep", tmp_path / "sweep.yaml")
    assert "grid has 1,000,000,000 points; leave at most 100,000" in error


def test_plain_int_and_float_options_are_parsed_as_usual(capsys):
    parser = NumberParser()
    assert isinstance(parser, argparse.ArgumentParser)
    parser.add_argument("--share", type=float)
    parser.add_argument("--count", type=int)
    read = parser.parse_args(["--share", "1e-3", "--count", "-7"])
    assert (read.share, read.count) == (1e-3, -7)

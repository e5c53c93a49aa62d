"""What every number on every command line is held to, whoever adds the next one."""

import argparse

import pytest

from launch.arguments import Number, NumberParser
from launch.cli import COMMANDS

from ..config import trees

ABSURD = ("nan", "inf", "-inf", "true", "1e300", "-1e300", "1e-300", "1" + "0" * 300, "9" * 5000, "", "1,5")


def _numbers():
    for command, module in COMMANDS.items():
        parser = NumberParser(prog=command)
        module.add_arguments(parser)
        for action in parser._actions:
            if action.type in (int, float) or isinstance(action.type, Number):
                yield pytest.param(
                    parser, action.option_strings[-1], id=f"{command} {action.option_strings[-1]}"
                )


@pytest.mark.parametrize(("parser", "option"), _numbers())
def test_no_number_is_absurd(parser, option, capsys):
    for text in ABSURD:
        with pytest.raises(SystemExit):
            parser.parse_args([f"{option}={text}"])
        line = capsys.readouterr().err.splitlines()[-1]
        assert option in line
        assert "; give " in line
        assert len(line) < 250


def test_the_walk_meets_the_numbers_of_every_command():
    met = {parameter.id for parameter in _numbers()}
    assert len(met) >= 25
    assert met >= {
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
        (["plan", "x", "--network", "nan"], "argument --network: nan is out of range; give a finite number of at most"),
        (["generate", "x", "--prompt", "", "--seed", "1e24"], "argument --seed: 1e24 is not an integer; give"),
        (["generate", "x", "--prompt", "", "--seed", "1" + "0" * 24], "is beyond 64 bits; give an integer"),
    ],
)  # fmt: skip
def test_a_number_that_cannot_be_is_one_line(typed, line, refused):
    assert line in refused(*typed)


def test_a_grid_is_counted_before_it_is_laid_out(tmp_path, refused):
    values = list(range(1, 1001))
    (tmp_path / "sweep.yaml").write_text(
        f"config: {trees.file(tmp_path)}\nname: x\ngrid: {{training.steps: {values}, run.seed: {values}, a: {values}}}"
    )
    said = refused("sweep", tmp_path / "sweep.yaml")
    assert "grid has 1,000,000,000 points; leave at most 100,000" in said


def test_plain_types_are_read_in_the_same_way(capsys):
    parser = NumberParser()
    assert isinstance(parser, argparse.ArgumentParser)
    parser.add_argument("--share", type=float)
    parser.add_argument("--count", type=int)
    read = parser.parse_args(["--share", "1e-3", "--count", "-7"])
    assert (read.share, read.count) == (1e-3, -7)

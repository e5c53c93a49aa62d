"""`megakernel config`: the schema for editors, and the keys on which two configurations differ."""

import json

import pytest

from launch.cli import main
from launch.exit_status import ExitStatus
from megakernel.config import Config, load, to_yaml
from megakernel.config.cluster import Cluster
from megakernel.config.json_schema import json_schema
from megakernel.config.resume import UNPROVEN

from ..config import trees


def printed(capsys, *arguments):
    assert main(["config", *map(str, arguments)]) == ExitStatus.DONE
    return capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "section"), [([], Config), (["run"], Config), (["cluster"], Cluster)])
def test_the_schema_is_printed_as_json(arguments, section, capsys):
    assert json.loads(printed(capsys, "--schema", *arguments)) == json_schema(section)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """A file, and a run that recorded it with two changes and an earlier heading."""
    monkeypatch.chdir(tmp_path)
    file = trees.file(tmp_path, "base.yaml")
    run = tmp_path / "runs" / "other"
    run.mkdir(parents=True)
    changed = load(file, ["training.steps=7", "model.attention={preset: flurka, near: {blocks: 2}}"])
    (run / "config.yaml").write_text(UNPROVEN + to_yaml(changed))
    return file, run


def test_keys_that_differ_are_listed_with_both_values(pair, capsys):
    file, run = pair
    expected = ["model.attention.near.blocks: 1 -> 2", "training.steps: 100 -> 7"]
    assert printed(capsys, "--diff", file, run).splitlines() == expected
    assert printed(capsys, "--diff", file, "other").splitlines() == expected, "a run is found by its name"
    turned = [line.partition(": ")[0] for line in printed(capsys, "--diff", run, file).splitlines()]
    assert turned == ["model.attention.near.blocks", "training.steps"]


def test_a_value_that_is_written_out_as_its_default_is_no_difference(tmp_path, capsys):
    short = trees.file(tmp_path, "short.yaml")
    long = trees.file(
        tmp_path, "long.yaml", model={"attention": {"preset": "flurka"}}, optimizer={"lr": 3e-4}
    )
    assert printed(capsys, "--diff", short, long) == f"{short} and {long} have the same value for every key\n"


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        ([], "CONFIG is missing; give one, --schema or --diff A B", ExitStatus.USAGE),
        (
            ["base.yaml", "--schema"],
            "base.yaml has no effect: --schema takes no file; remove it",
            ExitStatus.USAGE,
        ),
        (
            ["--diff", "base.yaml", "other", "x=1"],
            "x=1 has no effect: --diff takes two files or runs",
            ExitStatus.USAGE,
        ),
        (
            ["--schema", "--diff", "base.yaml", "other"],
            "--schema and --diff exclude each other",
            ExitStatus.USAGE,
        ),
        (
            ["--diff", "base.yaml", "none"],
            "--diff none is no YAML file and no run: runs/none/",
            ExitStatus.NOT_FOUND,
        ),
        (["--diff", "base.yaml", "none.yaml"], "none.yaml cannot be read (No such file", ExitStatus.USAGE),
    ],
)
def test_what_has_no_answer_is_refused_in_one_line(arguments, message, status, pair, capsys):
    assert main(["config", *arguments]) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"megakernel: error: {message}")
    assert shown.err.count("\n") == 1

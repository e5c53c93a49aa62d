"""Errors of `megakernel serve` before it loads a model."""

import pytest

import launch.serve
from launch.cli import main
from launch.exit_status import ExitStatus


def refused(capsys, *options):
    """The error line of the command."""
    assert main(["serve", "runs/none", *options]) == ExitStatus.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_missing_libraries_are_named_with_the_install_command(capsys, monkeypatch):
    monkeypatch.setattr("megakernel.config.extras.find_spec", lambda name: None)
    line = refused(capsys)
    assert line.endswith("serve needs fastapi and uvicorn; pip install 'megakernel[serve]'")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "cannot be read"),
        (b"\xff", "cannot be read"),
        (b" \n", "holds no key"),
        (b"a b", "no key"),
        ("\u00e9".encode(), "no key"),
    ],
)
def test_a_key_file_without_a_key_is_refused(content, error, tmp_path, capsys):
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    line = refused(capsys, "--api-key-file", str(file))
    assert f"--api-key-file {file}" in line
    assert error in line


def test_an_unusable_key_in_the_environment_is_refused(monkeypatch, capsys):
    monkeypatch.setenv(launch.serve.KEY, "a b")
    assert f"${launch.serve.KEY} holds no key; write one line of ASCII without spaces" in refused(capsys)


def test_a_missing_run_is_refused_in_one_line(capsys):
    assert "is not the folder of a run" in refused(capsys)

"""What `megakernel serve` says before it loads a model."""

import pytest

import launch.serve
from launch.cli import main
from launch.exit_status import ExitStatus


def refused(capsys, *options):
    """The line that it says."""
    assert main(["serve", "runs/none", *options]) == ExitStatus.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_without_its_libraries_it_says_how_to_install_them(capsys, monkeypatch):
    monkeypatch.setattr(launch.serve, "find_spec", lambda name: None)
    line = refused(capsys)
    assert line.endswith("serve needs fastapi and uvicorn; pip install -e '.[serve]' -c constraints.txt")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"\xff", "cannot be read"),
        (b" \n", "holds no key"),
        (b"a b", "no key"),
        ("\u00e9".encode(), "no key"),
    ],
)
def test_a_file_without_a_key_is_refused(content, said, tmp_path, capsys):
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    line = refused(capsys, "--api-key-file", str(file))
    assert f"--api-key-file {file}" in line
    assert said in line


def test_no_run_is_one_line(capsys):
    assert "is not the folder of a run" in refused(capsys)

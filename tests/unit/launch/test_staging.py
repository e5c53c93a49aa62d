"""An environment that is packed once and unpacked on a node's disk starts from there; tests/slurm has a job of it."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from launch.shipped import REPOSITORY
from launch.slurm import staging
from megakernel.config import UserError

pytestmark = pytest.mark.second

PROGRAM = (
    "import sys, json, mine; print(sys.prefix, sys.base_prefix, json.__file__, mine.__file__, mine.VALUE)"
)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with one module, and a submission beside it."""
    venv.create(tmp_path / "env", symlinks=True)
    write_module(tmp_path / "env", "one")
    (tmp_path / "submission" / "code").mkdir(parents=True)
    (tmp_path / "submission" / "code" / "run.py").write_text("")
    return tmp_path / "env"


def write_module(environment: Path, value: str) -> None:
    [packages] = environment.glob("lib/python3*/site-packages")
    (packages / "mine.py").write_text(f"VALUE = {value!r}\n")


def stage(environment: Path, action: str, disk: Path | str | None = None) -> str:
    """What the action prints, run by the environment's Python with this one's packages."""
    folder = environment.parent
    disk = disk or folder / "disk"
    libraries = os.pathsep.join(
        [str(REPOSITORY), *(path for path in sys.path if path.endswith("site-packages"))]
    )
    done = subprocess.run(
        [
            environment / "bin/python",
            "-m",
            "launch.slurm.staging",
            action,
            folder / "submission",
            "--folder",
            disk,
        ],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": libraries,
            "SLURM_JOB_ID": "7",
            "SLURMD_NODENAME": "n1",
        },
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == int("not staged" in done.stdout), done.stderr
    return done.stdout


def staged_values(environment: Path) -> list[str]:
    python = environment.parent / "disk/megakernel-7/environment/bin/python"
    done = subprocess.run([python, "-c", PROGRAM], env={}, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_all_is_read_from_the_nodes_disk(environment: Path):
    disk = environment.parent / "disk" / "megakernel-7"
    assert f"packed {environment} to {environment}/.stage/environment-" in stage(environment, "pack")
    said = stage(environment, "unpack")
    assert said.startswith("== n1: staged 0.")
    assert f" GB in {disk} in " in said
    *paths, value = staged_values(environment)
    at_home = (str(disk / "environment"), str(disk / "base"))
    base_is_local = staging.is_local(sys.base_prefix)
    for path in [paths[0], paths[3]] if base_is_local else paths:
        assert path.startswith(at_home)
    assert value == "one"
    assert (disk / "code" / "run.py").exists()
    assert (disk.stat().st_mode & 0o777) == 0o700


def test_it_is_packed_and_unpacked_again_once_a_file_has_changed(environment: Path):
    stage(environment, "pack")
    stage(environment, "unpack")
    first = {path.name for path in (environment / ".stage").glob("*.tar")}
    assert "packed" not in stage(environment, "pack")
    assert "staged before" in stage(environment, "unpack")
    write_module(environment, "another")
    said = stage(environment, "pack")
    assert f"packed {environment} to" in said
    assert f"{sys.base_prefix} to" not in said
    assert "staged before" not in stage(environment, "unpack")
    assert staged_values(environment)[-1] == "another"
    assert len(first & {path.name for path in (environment / ".stage").glob("*.tar")}) == len(first) - 1


@pytest.mark.parametrize(
    ("disk", "reason"),
    [
        ("$NOWHERE/x", "stage=$NOWHERE/x has a variable that this node does not set"),
        ("file", "Not a directory"),
    ],
)
def test_a_node_that_cannot_hold_it_says_what_is_read_instead(environment: Path, disk: str, reason: str):
    (environment.parent / "file").write_text("")
    assert "there are no archives" in stage(environment, "unpack")
    stage(environment, "pack")
    said = stage(environment, "unpack", disk if "$" in disk else environment.parent / disk)
    assert said.startswith("== n1: not staged (")
    assert reason in said
    assert f"processes read {environment}" in said


def test_a_variable_of_the_node_is_expanded_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_DISK", "/scratch/n1")
    assert staging.job_folder("$LOCAL_DISK/me", "5") == Path("/scratch/n1/me/megakernel-5")
    with pytest.raises(UserError, match="has a variable that this node does not set"):
        staging.job_folder("$LOCAL_DISKS/me", "5")


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("/usr", True),
        ("/usr/local", True),
        ("/library/python", False),
        ("/usrdata/venv", False),
        ("/home/x", False),
    ],
)
def test_only_the_systems_own_folders_are_on_every_nodes_disk(prefix, expected):
    assert staging.is_local(prefix) == expected

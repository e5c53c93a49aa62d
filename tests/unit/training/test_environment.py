import subprocess
from pathlib import Path

import numpy
import torch

from megakernel.training.environment import environment_text, package_versions, revision


def recorded_environment() -> dict[str, str]:
    lines = environment_text(["cpu"], world_size=2).splitlines()
    return dict(line.split(": ", 1) for line in lines[1:])


def test_an_entry_records_what_is_needed_to_repeat_the_start(monkeypatch):
    monkeypatch.setattr("sys.argv", ["megakernel", "pretrain", "a file.yaml"])
    found = recorded_environment()
    assert found["command"].endswith("megakernel pretrain 'a file.yaml'")
    assert found["folder"] == str(Path.cwd())
    assert found["processes"] == "2"
    assert found["devices"] == "cpu"
    assert found["torch"] == torch.__version__
    assert found["numpy"] == numpy.__version__


def test_only_variables_that_steer_the_run_are_recorded(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "chunked")
    for name in ("SECRET_TOKEN", "MEGAKERNEL_TOKEN", "NCCL_PASSWORD"):
        monkeypatch.setenv(name, "hunter2")
    text = environment_text([], 1)
    assert "NCCL_DEBUG: INFO\n" in text
    assert "MEGAKERNEL_BACKEND: chunked\n" in text
    assert "hunter2" not in text
    assert "also set: MEGAKERNEL_TOKEN, NCCL_PASSWORD" in text, "names alone already explain a difference"


def test_a_missing_package_is_recorded_as_not_installed(monkeypatch):
    monkeypatch.setattr("megakernel.training.environment.PACKAGES", ("no-such-package-anywhere",))
    assert package_versions() == {"no-such-package-anywhere": "not installed"}


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_code_is_recorded_as_git_revision_and_dirty_if_changed(tmp_path):
    source = tmp_path / "module.py"
    source.write_text("x = 1\n")
    git(tmp_path, "init", "-q")
    assert revision(source) == "not a git checkout", "an untracked file inside a repository is not its code"
    git(tmp_path, "add", "module.py")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert revision(source) == f"git {head}"
    source.write_text("x = 2\n")
    assert revision(source) == f"git {head} (dirty)"

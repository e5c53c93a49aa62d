"""`megakernel pretrain` ends when something fails, with the loader workers that it has by default."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from launch.exit_status import ExitStatus
from tests.distributed.training_run import write_config

FAILING = """
import sys
from importlib import import_module

module, owner, method, calls = sys.argv[1:5]
owner = getattr(import_module(module), owner)
inner, seen = getattr(owner, method), []

def failing(*args, **kwargs):
    seen.append(1)
    if len(seen) == int(calls):
        raise OSError(28, "the place of the test is full")
    return inner(*args, **kwargs)

setattr(owner, method, failing)
from launch.cli import main

sys.exit(main(sys.argv[5:]))
"""
"""Runs a command in which call number `calls` of a method fails."""

PLACES = {
    "reading ahead": "data_pipeline.loader _BatchDataset __getitems__ 6",
    "a step": "megakernel.training.engine Engine train_step 2",
    "observing": "megakernel.training.observing.observer Observer after_step 2",
    "logging": "megakernel.training.trainer Trainer _log 2",
    "metrics": "megakernel.training.observing.metrics_writer MetricsWriter write 3",
    "evaluation": "megakernel.training.engine Engine evaluate 2",
    "a save": "megakernel.training.engine Engine checkpoint_states 1",
    "the end of a save": "megakernel.training.trainer Trainer _record 1",
}
"""Place of a step -> module, class, method and call that fails there."""

END_SECONDS = 300
"""A run that has failed ends in a second; the rest is for imports on a loaded machine."""


def rank_zero() -> dict[str, str]:
    """The variables of the only rank of a world, as torchrun and `--nproc 1` set them."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}


def options(folder: Path, corpus: Path) -> list[str]:
    """A run of six steps that reads ahead with the default number of workers."""
    changes = ["data.num_workers=1", "training.steps=6", "training.eval_every=3", "checkpoint.every=3"]
    return ["pretrain", str(write_config(folder, corpus)), *changes]


@pytest.mark.second
@pytest.mark.parametrize("place", PLACES)
def test_a_run_of_one_rank_ends_when_something_fails(place, corpus, tmp_path):
    words = [*PLACES[place].split(), *options(tmp_path, corpus)]
    done = subprocess.run(
        [sys.executable, "-c", FAILING, *words],
        env=rank_zero() | {"MASTER_PORT": "29431"},
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
    )
    assert done.returncode == ExitStatus.FAILED, done.stdout + done.stderr
    assert "the place of the test is full" in done.stderr + done.stdout


def test_a_failed_save_ends_a_run_of_one_rank(corpus, tmp_path):
    def fill_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))

    command = [sys.executable, "-m", "launch.cli", *options(tmp_path, corpus), "--nproc", "1"]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
        preexec_fn=fill_disk,
    )
    assert done.returncode == ExitStatus.FAILED, done.stdout + done.stderr
    assert "could not be saved" in done.stdout + done.stderr

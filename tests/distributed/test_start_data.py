"""The start of a run opens its data on rank 0 alone, and the others wait as long as that takes."""

import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling import file_operations
from data_pipeline.loader import TrainingBatches
from data_pipeline.samples import CorpusSamples
from megakernel.config import Config, PreparationFailed, UserError, load
from megakernel.parallel import long_work as module
from megakernel.parallel.long_work import long_work
from megakernel.parallel.ranks import Ranks
from megakernel.training.data import build_indices, check_corpora, verified_corpora
from megakernel.training.engine import loader_arguments
from tests.distributed.processes import cpu_mesh, run_ranks
from tests.unit.data.conftest import documents, prepared, write_jsonl

from .training_run import pretrain_in_this_rank, train, write_config

SHORT = 2 / 60
"""Minutes of a timeout that the tests exceed."""


def opened(folder: Path) -> tuple[int, int]:
    """This rank's operations on files of the corpora until the indices are built, and then for a batch."""
    config = Config(
        run={"name": "run", "root": str(folder / "runs")},
        model={"num_layers": 1, "hidden_size": 64, "num_heads": 2},
        data={"train": str(folder / "web-*"), "index_cache": folder / "index", "num_workers": 0},
        training={"steps": 3, "seq_len": 32, "global_batch_size": 4, "eval_samples": 0},
    )
    with cpu_mesh() as mesh, file_operations(folder) as operations:
        found = check_corpora(config, Ranks.of(mesh), validation=False)
        corpora = verified_corpora(config, mesh, found, [config.run.folder])
        batches = TrainingBatches(config, corpora, **loader_arguments(mesh))
        build_indices(config, mesh, batches)
        before = len(operations)
        next(batches.from_step(0))
    return before, len(operations) - before


def test_only_rank_0_opens_the_corpora_and_the_others_only_what_they_read(tmp_path: Path):
    source = write_jsonl(tmp_path / "source.jsonl", documents(40, seed=1))
    prepared(tmp_path / "web-0", [str(source)])
    for number in range(1, 6):
        shutil.copytree(tmp_path / "web-0", tmp_path / f"web-{number}")
    (first, _), (other, reading) = run_ranks(opened, 2, tmp_path)
    assert first > 6
    assert other == 0
    # 4 samples, each of one of 6 corpora: their token files, and the index of an epoch.
    assert 0 < reading < 60


def work_longer_than_a_collective(minutes: float) -> Any:
    """Rank 0 works for twice the timeout of collectives."""
    with cpu_mesh(timeout_minutes=minutes) as mesh:
        module.BEAT_SECONDS = 0.2
        return long_work(mesh, "waiting", minutes, lambda: time.sleep(120 * minutes) or "done")


@pytest.mark.second
def test_work_longer_than_the_timeout_of_collectives_does_not_end_the_job():
    assert run_ranks(work_longer_than_a_collective, 3, SHORT) == ["done"] * 3


def work_without_a_sign_of_life(minutes: float) -> str:
    with cpu_mesh(timeout_minutes=10) as mesh:
        module.BEAT_SECONDS = 1000.0
        try:
            long_work(mesh, "indexing", minutes, lambda: time.sleep(150 * minutes))
        except PreparationFailed as error:
            mesh.broadcast_object(None)  # rank 0 ends in this collective
            return str(error)
        return "done"


@pytest.mark.second
def test_a_rank_0_without_a_sign_of_life_ends_the_others_with_a_status_of_their_own():
    first, other = run_ranks(work_without_a_sign_of_life, 2, SHORT)
    assert first == "done"
    assert other.startswith("indexing: rank 0 has given no sign of life for 0.03")


def failing_work(error: Exception) -> str:
    def fail() -> None:
        raise error

    with cpu_mesh() as mesh:
        try:
            long_work(mesh, "indexing", 1, fail)
        except Exception as caught:
            return f"{type(caught).__name__}: {caught}"
    return "done"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("data.train=x; prepare it"), "UserError: data.train=x; prepare it"),
        (MemoryError("no memory"), "PreparationFailed: indexing failed on rank 0 (MemoryError: no memory)"),
    ],
)
def test_a_failure_of_rank_0_is_raised_on_all_ranks(error, message):
    assert run_ranks(failing_work, 2, error) == [message] * 2
    assert type(pickle.loads(pickle.dumps(error))) is type(error)


def interrupted_in_the_second_epoch(config: Path, overrides: tuple[str, ...]) -> int:
    build = CorpusSamples._dataset

    def fail(samples: CorpusSamples, epoch: int, folder: Path) -> None:
        if epoch == 1:
            raise MemoryError("for the second epoch")
        build(samples, epoch, folder)

    CorpusSamples._dataset = fail
    try:
        return pretrain_in_this_rank(config, overrides)
    except PreparationFailed:
        return 92


@pytest.mark.second
def test_finished_parts_of_an_index_are_kept(tmp_path):
    source = write_jsonl(tmp_path / "source.jsonl", documents(60, seed=1))
    prepared(tmp_path / "web", [str(source)])
    config = write_config(tmp_path, tmp_path / "web")
    overrides = ("training.steps=4", "training.eval_samples=0", "logging.tensorboard=false")
    assert run_ranks(interrupted_in_the_second_epoch, 2, config, overrides) == [92, 92]
    (built,) = (tmp_path / "web/.index_cache").glob("train-*epoch*")
    written = {file.name: file.stat().st_mtime_ns for file in built.iterdir()}
    train(config, 2, *overrides)
    assert {file.name: file.stat().st_mtime_ns for file in built.iterdir()} == written
    assert load(config, overrides).run.folder.is_dir()

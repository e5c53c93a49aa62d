"""Checkpoints that a thread writes while training goes on: the same files, and no kill loses an older one."""

import os
import signal
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megakernel.checkpoint import folder as checkpoint_folder
from megakernel.checkpoint.folder import CheckpointFolder
from megakernel.checkpoint.manifest import Abandoned, RecordedFile
from megakernel.config import RunFailed
from megakernel.training import saver
from megakernel.training.engine import Engine
from megakernel.training.state_files import StateFiles
from tests.distributed.processes import RankFailedError, run_ranks, this_process
from tests.distributed.training_run import (
    assert_identical,
    layout,
    pretrain_and_return_output,
    pretrain_in_this_rank,
    train,
    write_config,
)
from tests.tiers import tiered

SMALL = (
    *("model.num_layers=2", "model.attention_pattern=[main, softmax]", "training.global_batch_size=4"),
    *("training.eval_samples=0", "logging.tensorboard=false", "checkpoint.every=2"),
)
OPTIONS = (*SMALL, "training.steps=4")
TIMEOUT = 240.0
LAYOUTS = [
    *("one process", "dp2", "dp2 zero 1", "dp2 zero 2", "dp2 zero 3", "bfloat16 dp2 zero 1"),
    *("bfloat16 dp2 zero 3", "tp2", "tp2 zero 1", "pp2", "bfloat16 pp2 zero 1", "cp2 zero 2"),
]
OFFLOAD = "deepspeed={zero_optimization: {offload_optimizer: {device: cpu}}}"


def pretrain_writing_late(config: Path, overrides: tuple[str, ...]) -> int:
    """Train; the files of step 2 are written only after step 3 has changed all that they hold."""
    stepped = threading.Event()
    write, train_step, steps = StateFiles.write, Engine.train_step, []

    def late_write(self, states, folder, abandoned):
        if folder.name == "step_2.partial":
            assert threading.current_thread() is not threading.main_thread()
            assert stepped.wait(60)
        return write(self, states, folder, abandoned)

    def counted_step(self, *args):
        result = train_step(self, *args)
        steps.append(1)
        if len(steps) == 3:
            stepped.set()
        return result

    StateFiles.write, Engine.train_step = late_write, counted_step
    return pretrain_in_this_rank(config, overrides)


def contents(checkpoint: Path) -> dict[str, bytes]:
    return {
        path.relative_to(checkpoint).as_posix(): path.read_bytes()
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        *tiered([(name, ()) for name in LAYOUTS], [("dp2 zero 2", ())]),
        *tiered([("dp2 zero 2", (OFFLOAD,))], []),
    ],
)
def test_the_files_are_those_of_a_save_that_training_waits_for(ranks, keys, corpus, tmp_path):
    world_size, *overrides = (*layout(ranks), *OPTIONS, *keys)
    config = write_config(tmp_path, corpus)
    train(config, world_size, *overrides, "run.name=waits", "checkpoint.async_save=false")
    late = (*overrides, "run.name=late")
    statuses = run_ranks(pretrain_writing_late, world_size, config, late, timeout=TIMEOUT)
    assert statuses == [0] * world_size
    for step in ("step_2", "step_4"):
        expected = contents(tmp_path / "waits/checkpoints" / step)
        actual = contents(tmp_path / "late/checkpoints" / step)
        assert actual.keys() == expected.keys()
        assert [name for name in expected if actual[name] != expected[name]] == []


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_file() -> None:
    """While a file is written, after its first bytes."""
    write = RecordedFile.write

    def killing(self, data):
        write(self, bytes(data)[:100])
        return kill() if "step_4" in str(self._file.name) else write(self, bytes(data)[100:])

    RecordedFile.write = killing


def kill_before_manifest() -> None:
    write = checkpoint_folder.write_manifest
    checkpoint_folder.write_manifest = lambda *args: kill() if "step_4" in str(args[0]) else write(*args)


def kill_before_rename() -> None:
    stage = CheckpointFolder._stage_latest
    CheckpointFolder._stage_latest = lambda self, final: (
        kill() if final.name == "step_4" else stage(self, final)
    )


def kill_before_latest() -> None:
    """Between the renames of the checkpoint and of `latest`."""
    rename = Path.rename

    def killing(self, target):
        rename(self, target)
        return kill() if Path(target).name == "step_4" else Path(target)

    Path.rename = killing


def kill_while_pruning() -> None:
    prune = CheckpointFolder._prune
    CheckpointFolder._prune = lambda self, saved: kill() if saved == 4 else prune(self, saved)


PHASES: dict[str, Callable[[], None]] = {
    "in a file": kill_in_file,
    "before the manifest": kill_before_manifest,
    "before the rename": kill_before_rename,
    "before latest": kill_before_latest,
    "while pruning": kill_while_pruning,
}
NEWEST = {"before latest": {"step_2", "step_4"}, "while pruning": {"step_2", "step_4"}}
"""Phase -> the checkpoints that a kill in it leaves, if not only the older one."""

STEPS = (*SMALL, "training.steps=7", "checkpoint.keep=1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    """The metrics of an uninterrupted run on a layout, made once."""
    config = write_config(tmp_path_factory.mktemp("whole"), corpus)

    @cache
    def run(ranks: str) -> list[dict[str, Any]]:
        world_size, *overrides = (*layout(ranks), *STEPS)
        return train(config, world_size, *overrides, f"run.name={ranks.replace(' ', '_')}")

    return run


def pretrain_killed_in(phase: str, victim: int, config: Path, overrides: tuple[str, ...]) -> Any:
    """Train, and kill rank `victim` in a phase of the save of step 4."""
    if this_process().rank == victim:
        PHASES[phase]()
    return pretrain_in_this_rank(config, overrides)


CASES = [
    *((phase, "one process", 0) for phase in PHASES),
    *((phase, "dp2 zero 1", 0) for phase in PHASES),
    *(("in a file", ranks, 1) for ranks in ("dp2 zero 1", "dp2 zero 2", "dp2 zero 3", "tp2", "pp2")),
]


@pytest.mark.parametrize(
    ("phase", "ranks", "victim"),
    tiered(CASES, [("in a file", "dp2 zero 1", 1), ("before latest", "one process", 0)]),
)
def test_a_kill_in_any_phase_loses_nothing_older_and_the_run_resumes_bit_identically(
    phase, ranks, victim, whole, corpus, tmp_path
):
    world_size, *overrides = (*layout(ranks), *STEPS)
    config = write_config(tmp_path, corpus)
    killed = (*overrides, "run.name=killed")
    with pytest.raises(RankFailedError, match="exit status -9"):
        run_ranks(pretrain_killed_in, world_size, phase, victim, config, killed, timeout=TIMEOUT)
    left = {path.name for path in (tmp_path / "killed/checkpoints").glob("step_*")}
    complete = {name for name in left if not name.endswith(".partial")}
    assert complete == NEWEST.get(phase, {"step_2"})
    assert_identical(train(config, world_size, *killed), whole(ranks))
    assert {path.name for path in (tmp_path / "killed/checkpoints").iterdir()} == {"step_7", "latest"}


def pretrain_without_memory(config: Path, overrides: tuple[str, ...]) -> str:
    """Train on a machine without free memory; returns what was printed."""
    saver.free_host_memory = lambda: 0
    return pretrain_and_return_output(config, overrides)


def test_a_machine_without_memory_for_the_copies_says_so_and_saves(corpus, tmp_path):
    config = write_config(tmp_path, corpus)
    [output] = run_ranks(pretrain_without_memory, 1, config, OPTIONS, timeout=TIMEOUT)
    assert "step_2 is written while training waits: a machine lacks 0.0 GiB of host memory" in output
    found = CheckpointFolder(tmp_path / "run/checkpoints", keep=2).newest_good()
    assert found.checkpoint is not None
    assert found.checkpoint.step == 4


def pretrain_failing(kind: type[Exception], config: Path, overrides: tuple[str, ...]) -> bool:
    """Train until an error in step 3, before the files of step 2 are written; returns whether they were abandoned."""
    failed, gave_up = threading.Event(), threading.Event()
    write, train_step = StateFiles.write, Engine.train_step

    def late_write(self, states, folder, abandoned):
        assert failed.wait(60)
        # An error of all ranks is followed by a wait for this thread, one of this rank alone by its end.
        if abandoned.wait(1 if kind is RunFailed else 60):
            gave_up.set()
            raise Abandoned
        return write(self, states, folder, abandoned)

    def failing_step(self, *args):
        if self._step == 2:
            failed.set()
            raise kind("the end")
        return train_step(self, *args)

    StateFiles.write, Engine.train_step = late_write, failing_step
    with pytest.raises(kind, match="the end"):
        pretrain_in_this_rank(config, overrides)
    return gave_up.wait(0 if kind is RunFailed else 60)


@pytest.mark.second
@pytest.mark.parametrize(("kind", "abandons"), [(RunFailed, False), (RuntimeError, True)])
def test_an_error_of_all_ranks_ends_after_the_save_and_one_of_this_rank_at_once(
    kind, abandons, corpus, tmp_path
):
    config = write_config(tmp_path, corpus)
    assert run_ranks(pretrain_failing, 1, kind, config, OPTIONS, timeout=TIMEOUT) == [abandons]
    saved = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert saved == ({"step_2.partial"} if abandons else {"step_2", "latest"})

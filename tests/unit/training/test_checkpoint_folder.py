import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from megakernel.checkpoint.folder import CheckpointFolder, SaveFailed
from megakernel.checkpoint.manifest import MANIFEST, SavedCheckpoint, SavedProgress, flushed, write_manifest
from megakernel.parallel.ranks import Ranks
from tests.hostile import flip, plant

from .threads import on_ranks

LAYOUT = {"tensor": 1, "context": 1, "data": 1, "pipeline": 1, "zero_stage": 0}


def progress(step: int) -> SavedProgress:
    return SavedProgress(step, step * 8, step * 8 * 64, LAYOUT, {"torch": torch.__version__})


def write_tensor(folder: Path, numbers: int = 16) -> None:
    (folder / "zero").mkdir(exist_ok=True)
    torch.save(torch.arange(numbers), folder / "zero" / "weights.pt")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints", keep=2)


def save(folder: CheckpointFolder, *steps: int) -> None:
    for step in steps:
        folder.save(progress(step), write_tensor)


def test_a_saved_checkpoint_is_found_with_its_progress(folder):
    save(folder, 10)
    found = folder.newest_good()
    assert found.checkpoint == SavedCheckpoint(folder.root / "step_10", progress(10))
    assert found.broken == {}
    assert (folder.root / "latest").read_text() == "step_10"


def test_a_new_run_has_no_checkpoint(folder):
    found = folder.newest_good()
    assert found.checkpoint is None
    assert found.broken == {}
    assert folder.remove_leftovers() == []


def test_newest_is_by_step_not_by_name(folder):
    save(folder, 9, 10)
    assert folder.newest_good().checkpoint.step == 10


def test_only_the_newest_checkpoints_are_kept(folder):
    save(folder, 1, 2, 3, 4)
    assert names(folder.root) == {"step_3", "step_4", "latest"}


def test_multiples_of_keep_every_are_kept_forever(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1, keep_every=3)
    save(folder, *range(1, 9))
    assert names(tmp_path) == {"step_3", "step_6", "step_8", "latest"}


def weights(step: Path) -> Path:
    return step / "zero" / "weights.pt"


def change_progress(step: Path) -> None:
    text = (step / MANIFEST).read_text()
    (step / MANIFEST).write_text(text.replace('"consumed_samples": 160', '"consumed_samples": 961'))


def unreadable_manifest(step: Path) -> None:
    (step / MANIFEST).unlink()
    (step / MANIFEST).mkdir()


def plant_code(step: Path) -> None:
    """Replace the weights by a pickle with code, and write a manifest that matches it."""
    plant(weights(step), step / "harm")
    write_manifest(step, progress(20), flushed(step, [weights(step)]))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda step: (step / MANIFEST).unlink(), "complete.json is missing"),
        (lambda step: (step / MANIFEST).write_text('{"files": {"zero/we'), "complete.json is damaged"),
        (lambda step: (step / MANIFEST).write_text("{}"), "complete.json is damaged"),
        (
            lambda step: (step / MANIFEST).write_text('{"files": {"a": Infinity}}'),
            "complete.json is damaged",
        ),
        (lambda step: (step / MANIFEST).write_text("[" * 100_000), "complete.json is damaged"),
        (unreadable_manifest, "complete.json cannot be read (Is a directory)"),
        (change_progress, "complete.json is damaged"),
        (lambda step: os.truncate(weights(step), 10), "weights.pt has 10 bytes instead of"),
        (lambda step: weights(step).unlink(), "weights.pt is missing"),
        (lambda step: flip(weights(step), 0.0), "weights.pt is damaged"),
        (lambda step: flip(weights(step), 0.5), "weights.pt is damaged"),
        (lambda step: flip(weights(step), 1.0), "weights.pt is damaged"),
        (
            lambda step: weights(step).write_bytes(bytes(os.path.getsize(weights(step)))),
            "weights.pt is damaged",
        ),
        # A good file of the same size.
        (lambda step: torch.save(-torch.arange(16), weights(step)), "weights.pt is damaged"),
        (plant_code, "weights.pt names posix.mkdir, which is code"),
    ],
)
def test_a_broken_newest_checkpoint_is_reported_and_the_previous_one_used(folder, damage, reason):
    save(folder, 10, 20)
    damage(folder.root / "step_20")
    found = folder.newest_good()
    assert found.checkpoint.step == 10
    assert list(found.broken) == [folder.root / "step_20"]
    assert reason in found.broken[folder.root / "step_20"]
    assert not (folder.root / "step_20" / "harm").exists()


def test_a_checkpoint_that_training_replaces_while_it_is_verified_is_not_a_broken_one(tmp_path, monkeypatch):
    training = CheckpointFolder(tmp_path, keep=1)
    save(training, 10)
    verified = SavedCheckpoint.verified

    def while_training(folder: Path, ranks: Ranks) -> SavedCheckpoint:
        if folder.name == "step_10":
            save(training, 20)
        return verified(folder, ranks)

    monkeypatch.setattr(SavedCheckpoint, "verified", while_training)
    found = CheckpointFolder(tmp_path, keep=1).newest_good()
    assert found.checkpoint.step == 20
    assert found.broken == {}


def test_every_checkpoint_before_a_damaged_one_is_verified_too(folder):
    save(folder, 10, 20)
    for step in (20, 10):
        flip(weights(folder.root / f"step_{step}"), 0.5)
    with pytest.raises(ValueError, match=r"step_20: zero/weights.pt is damaged.*step_10: zero/weights.pt is"):
        folder.newest_good()


def test_a_damaged_checkpoint_is_replaced_and_does_not_count_as_kept(folder):
    save(folder, 10, 20)
    flip(weights(folder.root / "step_20"), 0.5)
    assert folder.newest_good().checkpoint.step == 10
    save(folder, 30)
    assert names(folder.root) == {"step_10", "step_30", "latest"}
    flip(weights(folder.root / "step_30"), 0.5)
    assert folder.newest_good().checkpoint.step == 10
    save(folder, 30)
    assert folder.newest_good().checkpoint.step == 30


@pytest.mark.parametrize("damaged", range(4))
def test_ranks_verify_a_share_each_and_choose_the_same_checkpoint(damaged, tmp_path):
    def work(ranks: Ranks):
        folder = CheckpointFolder(tmp_path, keep=2, ranks=ranks)
        for step in (5, 6):
            own = tmp_path / f"step_{step}.partial" / f"rank_{ranks.rank}"

            def write(path: Path, own: Path = own):
                own.write_bytes(os.urandom(1000))
                return flushed(path, [own])

            folder.save(progress(step), write)
        ranks.on_rank_zero(lambda: flip(tmp_path / "step_6" / f"rank_{damaged}", 0.5))
        found = folder.newest_good()
        return found.checkpoint.step, found.broken

    outcomes = on_ranks(4, work)
    reason = f"rank_{damaged} is damaged: its checksum is not that of saving"
    assert outcomes == [(5, {tmp_path / "step_6": reason})] * 4


def test_a_checkpoint_without_checksums_is_good(folder):
    save(folder, 10)
    file = folder.root / "step_10" / MANIFEST
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps({"progress": manifest["progress"], "files": manifest["files"]}))
    assert folder.newest_good().checkpoint == SavedCheckpoint(folder.root / "step_10", progress(10))


def test_a_run_without_a_good_checkpoint_does_not_silently_start_over(folder):
    save(folder, 10)
    os.truncate(weights(folder.root / "step_10"), 10)
    with pytest.raises(ValueError, match=r"step_10: zero/weights.pt has 10 bytes.*delete"):
        folder.newest_good()


def test_a_broken_checkpoint_is_replaced_when_its_step_is_saved_again(folder):
    save(folder, 10, 20)
    os.truncate(weights(folder.root / "step_20"), 10)
    save(folder, 20)
    assert folder.newest_good().checkpoint.step == 20
    assert names(folder.root) == {"step_10", "step_20", "latest"}


def test_a_step_is_replaced_and_pruned_where_files_in_use_cannot_be_deleted(folder, monkeypatch):
    save(folder, 10)
    # As on NFS while somebody reads them.
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
    os.truncate(weights(folder.root / "step_10"), 10)
    save(folder, 10, 20, 30)
    assert {name for name in names(folder.root) if not name.endswith(".partial")} == {
        *("step_20", "step_30", "latest")
    }
    monkeypatch.undo()
    assert len(folder.remove_leftovers()) == 2


def test_saving_deletes_no_good_checkpoint_in_place_of_a_broken_newer_one(folder):
    save(folder, 10, 20, 30)
    os.truncate(weights(folder.root / "step_30"), 10)
    save(folder, 25)
    assert names(folder.root) == {"step_20", "step_25", "step_30", "latest"}
    assert folder.newest_good().checkpoint.step == 25


def test_saving_a_good_step_again_writes_nothing_and_repairs_latest(folder):
    save(folder, 10, 20)
    (folder.root / "latest").write_text("step_10")  # a kill between the two renames leaves this

    def must_not_write(path: Path) -> None:
        raise AssertionError("written again")

    folder.save(progress(20), must_not_write)
    assert (folder.root / "latest").read_text() == "step_20"


def test_the_partial_checkpoint_of_a_killed_save_is_removed_at_the_next_start(folder):
    save(folder, 10)
    script = f"""
        import os, signal
        from pathlib import Path
        from megakernel.checkpoint.manifest import SavedProgress
        from megakernel.checkpoint.folder import CheckpointFolder
        def write(folder):
            (folder / "half").write_bytes(b"x" * 100)
            os.kill(os.getpid(), signal.SIGKILL)
        CheckpointFolder(Path({str(folder.root)!r}), keep=2).save(SavedProgress(20, 0, 0, {{}}, {{}}), write)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)]).returncode == -9
    assert folder.newest_good().checkpoint.step == 10
    assert folder.remove_leftovers() == [folder.root / "step_20.partial"]
    assert names(folder.root) == {"step_10", "latest"}


def test_a_save_that_fails_on_one_rank_raises_the_same_error_on_all(tmp_path):
    save(CheckpointFolder(tmp_path, keep=2), 10)

    def work(ranks: Ranks):
        def write(path: Path) -> None:
            if ranks.rank == 2:
                raise OSError(28, "No space left on device")
            (path / f"rank_{ranks.rank}.pt").write_bytes(b"weights")

        CheckpointFolder(tmp_path, keep=2, ranks=ranks).save(progress(20), write)

    outcomes = on_ranks(4, work)
    assert all(isinstance(error, SaveFailed) for error in outcomes)
    assert len({str(error) for error in outcomes}) == 1
    for part in ("rank 2", "No space left", str(tmp_path), "MiB free", "start the same command"):
        assert part in str(outcomes[0])
    assert names(tmp_path) == {"step_10", "latest"}
    assert CheckpointFolder(tmp_path, keep=2).newest_good().checkpoint.step == 10


def test_files_of_all_ranks_are_in_the_manifest(tmp_path):
    def work(ranks: Ranks):
        folder = CheckpointFolder(tmp_path, keep=2, ranks=ranks)

        def write(path: Path) -> None:
            (path / f"rank_{ranks.rank}").write_bytes(b"w" * ranks.rank)

        folder.save(progress(5), write)
        return folder.newest_good().checkpoint.step

    assert on_ranks(3, work) == [5, 5, 5]
    manifest = json.loads((tmp_path / "step_5" / MANIFEST).read_text())
    assert manifest["files"] == {"rank_0": 0, "rank_1": 1, "rank_2": 2}


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 1 MiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(mounted), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip(f"mounting a tmpfs needs root: {os.strerror(ctypes.get_errno())}")
    yield mounted
    libc.umount(bytes(mounted))


def test_a_full_disk_leaves_the_previous_checkpoint_good(small_disk):
    folder = CheckpointFolder(small_disk / "checkpoints", keep=2)
    folder.save(progress(10), lambda path: write_tensor(path, 40_000))  # 320 kB
    used = shutil.disk_usage(small_disk).used
    with pytest.raises(SaveFailed, match=r"step_20 .* MiB free\).*free space"):
        folder.save(progress(20), lambda path: write_tensor(path, 120_000))  # 960 kB more
    assert folder.newest_good().checkpoint.step == 10
    assert (folder.root / "latest").read_text() == "step_10"
    assert names(folder.root) == {"step_10", "latest"}
    assert shutil.disk_usage(small_disk).used == used, "a failed save frees its space"
    folder.save(progress(30), lambda path: write_tensor(path, 40_000))
    assert folder.newest_good().checkpoint.step == 30


def test_a_file_size_limit_leaves_the_previous_checkpoint_good(folder):
    """Stands for a full disk where mounting one is not allowed: the kernel refuses to let a file grow."""
    save(folder, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(SaveFailed, match="step_20 could not be saved"):
            folder.save(progress(20), lambda path: write_tensor(path, 120_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert folder.newest_good().checkpoint.step == 10
    assert names(folder.root) == {"step_10", "latest"}

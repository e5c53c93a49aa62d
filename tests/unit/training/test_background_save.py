"""A checkpoint folder whose files are written in threads, between steps of the ranks."""

import threading
from pathlib import Path

import pytest

from megakernel.checkpoint.folder import CheckpointFolder, SaveFailed, SaveState
from megakernel.checkpoint.manifest import (
    MANIFEST,
    Abandoned,
    RecordedFile,
    SavedCheckpoint,
    SavedFile,
    SavedProgress,
)
from megakernel.parallel.ranks import Ranks

from .threads import on_ranks


def progress(step: int) -> SavedProgress:
    return SavedProgress(step, step, step, {}, {})


class Writer:
    """Writes a rank's file when it is allowed to."""

    def __init__(self, rank: int = 0, error: OSError | None = None):
        self.rank = rank
        self.error = error
        self.allowed = threading.Event()

    def stage(self, folder: Path):
        def write() -> dict[str, SavedFile]:
            assert self.allowed.wait(60)
            if self.error is not None:
                raise self.error
            with RecordedFile(folder / f"rank_{self.rank}", threading.Event()) as file:
                file.write(b"x" * 1000)
            return {f"rank_{self.rank}": file.record}

        return write


def until_ready(folder: CheckpointFolder) -> None:
    """Wait for this rank's thread, as a rank does not that trains."""
    while folder.state is SaveState.WRITING:
        threading.Event().wait(0.001)


def test_nothing_waits_until_files_are_written_and_then_the_checkpoint_is_published(tmp_path):
    folder, writer = CheckpointFolder(tmp_path, keep=1), Writer()
    assert folder.advance(folder.state) is None
    folder.begin(progress(1), writer.stage)
    assert folder.state is SaveState.WRITING
    assert folder.advance(folder.state) is None
    assert not (tmp_path / "latest").exists()
    writer.allowed.set()
    seen = []
    while folder.is_saving:
        until_ready(folder)
        seen.append(folder.advance(folder.state))
    assert seen == [None, progress(1), None]
    assert folder.newest_good().checkpoint == SavedCheckpoint(tmp_path / "step_1", progress(1))
    assert (tmp_path / "latest").read_text() == "step_1"


def test_the_next_save_begins_when_the_one_before_is_complete(tmp_path):
    folder, first, second = CheckpointFolder(tmp_path, keep=1), Writer(), Writer()
    folder.begin(progress(1), first.stage)
    threading.Timer(0.1, first.allowed.set).start()

    def stage(partial: Path):
        assert (tmp_path / "latest").read_text() == "step_1"
        return second.stage(partial)

    folder.begin(progress(2), stage)
    second.allowed.set()
    assert folder.finish() == progress(2)
    assert {path.name for path in tmp_path.iterdir()} == {"step_2", "latest"}
    assert folder.finish() is None


def test_a_rank_that_fails_is_reported_on_all_ranks_at_the_next_step(tmp_path):
    CheckpointFolder(tmp_path, keep=2).save(progress(1), lambda path: (path / "a").write_text("a") and None)
    writers = [Writer(rank, OSError(28, "No space left") if rank == 2 else None) for rank in range(3)]

    def work(ranks: Ranks):
        folder, writer = CheckpointFolder(tmp_path, keep=2, ranks=ranks), writers[ranks.rank]
        folder.begin(progress(2), writer.stage)
        writer.allowed.set()
        until_ready(folder)
        (agreed,) = {max(ranks.all(lambda: folder.state))}
        assert agreed is SaveState.FAILED
        try:
            folder.advance(agreed)
        except SaveFailed as error:
            assert not folder.is_saving
            return str(error)

    messages = on_ranks(3, work)
    assert len(set(messages)) == 1
    assert "step_2 could not be saved" in messages[0]
    assert "rank 2 on" in messages[0]
    assert "No space left" in messages[0]
    assert {path.name for path in tmp_path.iterdir()} == {"step_1", "latest"}


def test_a_failure_while_publishing_is_reported_on_all_ranks(tmp_path):
    def work(ranks: Ranks):
        folder = CheckpointFolder(tmp_path, keep=2, ranks=ranks)
        writer = Writer(ranks.rank)

        def stage(partial: Path):
            (partial / MANIFEST).mkdir(exist_ok=True)
            return writer.stage(partial)

        folder.begin(progress(3), stage)
        writer.allowed.set()
        try:
            folder.finish()
        except SaveFailed as error:
            return str(error)

    messages = on_ranks(2, work)
    assert len(set(messages)) == 1
    assert "Is a directory" in messages[0]
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_recorded_as_it_was_written(tmp_path):
    with RecordedFile(tmp_path / "file", threading.Event()) as file:
        for data in (b"", b"abc", bytearray(2**25), memoryview(b"12345678").cast("I")):
            assert file.write(data) == memoryview(data).nbytes
    assert file.record == SavedFile.of(tmp_path / "file")


def test_writing_ends_at_once_when_the_process_does(tmp_path):
    abandoned = threading.Event()
    with RecordedFile(tmp_path / "file", abandoned) as file:
        file.write(b"abc")
        abandoned.set()
        with pytest.raises(Abandoned):
            file.write(b"abc")

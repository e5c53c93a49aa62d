"""Checkpoints that are written while training goes on.

Training waits while each rank copies its state into host memory. Then a thread writes the files and flushes them, and
that of rank 0 publishes the checkpoint and deletes old ones. The threads call no collective: ranks meet between two
steps, after they have agreed that none of them still writes, so all collectives stay in the training thread's order.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils import _pytree as pytree

from megakernel.checkpoint.folder import CheckpointFolder, Records, SaveFailed, SaveState
from megakernel.checkpoint.manifest import SavedProgress
from megakernel.config import RunFailed, UserError
from megakernel.parallel.device import free_host_memory

from .engine import Engine
from .state_files import States

_NOTED_WAIT = 1.0
"""Seconds that a save waits for the one before without a word."""


def _tensors(states: States) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(states) if isinstance(leaf, Tensor)]


def state_bytes(states: States) -> int:
    """Bytes of the storages of all tensors."""
    storages = [tensor.untyped_storage() for tensor in _tensors(states)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Staging:
    """Copies of states in host memory, pinned for a GPU. The memory of the first copy is kept for the next ones.

    neighbors: processes on this machine, which copy at the same time.
    """

    def __init__(self, device: torch.device, neighbors: int):
        self._pinned = device.type == "cuda"
        self._neighbors = neighbors
        self._stager: DefaultStager | None = None

    def missing_bytes(self, states: States) -> int:
        """Bytes of host memory that the first copies of all processes of this machine lack; 0 if they fit."""
        if self._stager is not None:
            return 0
        return max(0, self._neighbors * state_bytes(states) - free_host_memory())

    def copy(self, states: States) -> States:
        """A copy of the states; the device has finished it."""
        if self._stager is None:
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=self._pinned,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=self._pinned,
                )
            )
        staged = self._stager.stage(dict(states))
        assert isinstance(staged, dict)
        # Which files record, too, and the stager drops.
        for tensor, copied in zip(_tensors(states), _tensors(staged), strict=True):
            copied.requires_grad_(tensor.requires_grad)
        return staged


class Saver:
    """Saves the checkpoints of a run. All ranks call the same methods in the same order.

    In a `with` block, whose end waits for a save that has begun, unless only this rank failed.
    """

    def __init__(
        self,
        engine: Engine,
        checkpoints: CheckpointFolder,
        note: Callable[[str], None],
        saved: Callable[[int], None],
    ):
        """note: prints a line on rank 0. saved: called with the step of a checkpoint that is complete."""
        self._engine = engine
        self._mesh = engine.mesh
        self._checkpoints = checkpoints
        self._note = note
        self._saved = saved
        is_async = engine.config.checkpoint.async_save
        self._staging = Staging(self._mesh.device, self._mesh.local_world_size) if is_async else None
        self._abandoned = Event()
        self._began = self._stalled = 0.0
        self._written = 0
        self._scalars: dict[str, float] = {}

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, UserError | RunFailed):  # alike on all ranks
            try:
                self.finish()
            except SaveFailed as failure:
                if error is None:
                    raise
                self._note(str(failure))
        else:
            self._abandoned.set()

    @property
    def state(self) -> SaveState:
        """What this rank does; `advance` takes the greatest of all ranks, on which they agree after each step."""
        return self._checkpoints.state

    def begin(self, progress: SavedProgress, prune: bool) -> None:
        """Begin a save, after the one before is complete; raises SaveFailed, alike on all ranks."""
        began = time.perf_counter()
        earlier = self.finish()
        if earlier and (waited := time.perf_counter() - began) > _NOTED_WAIT:
            self._note(
                f"the save of step {progress.step} waited {waited:.1f} s until that of step {earlier} was written; "
                "raise checkpoint.every"
            )
        self._began, self._stalled = began, 0.0
        with self._stalling(began):
            self._checkpoints.begin(progress, self._stage, prune, in_background=self._staging is not None)
        if self._staging is None:
            self.finish()

    def advance(self, agreed: SaveState) -> None:
        """Go on with a save as `CheckpointFolder.advance` does. Raises SaveFailed, alike on all ranks."""
        with self._stalling(time.perf_counter()):
            done = self._checkpoints.advance(agreed)
        self._complete(done)

    def finish(self) -> int | None:
        """Wait until a save that has begun is complete; returns its step. Raises SaveFailed, alike on all ranks."""
        if not self._checkpoints.is_saving:
            return None
        with self._stalling(time.perf_counter()):
            done = self._checkpoints.finish()
        self._complete(done)
        return None if done is None else done.step

    def scalars(self) -> dict[str, float]:
        """Of the last save that was completed since the last call, by TensorBoard tag; empty without one."""
        scalars, self._scalars = self._scalars, {}
        return scalars

    @contextmanager
    def _stalling(self, began: float) -> Iterator[None]:
        self._mesh.progress.begin("saving")
        yield
        self._stalled += time.perf_counter() - began

    def _stage(self, folder: Path) -> Callable[[], Records]:
        """Copy this rank's states, and return the function that writes them."""
        states = self._engine.checkpoint_states(folder)
        write = partial(self._write, folder)
        if self._staging is not None:
            missing = self._staging.missing_bytes(states)
            (most,) = self._mesh.all_reduce_max(missing)
            if not most:
                return partial(write, self._staging.copy(states))
            self._note(
                f"{folder.stem} is written while training waits: a machine lacks {most / 2**30:,.1f} GiB of host "
                "memory for the copies of checkpoint.async_save; give the job more, or set checkpoint.async_save=false"
            )
        records = write(states)
        return lambda: records

    def _write(self, folder: Path, states: States) -> Records:
        records = self._engine.state_files.write(states, folder, self._abandoned)
        self._written = sum(record.size for record in records.values())
        return records

    def _complete(self, done: SavedProgress | None) -> None:
        if done is None:
            return
        self._scalars = {
            "checkpoint/stall_time": self._stalled,
            "checkpoint/write_time": time.perf_counter() - self._began,
            "checkpoint/written_gib": self._written / 2**30,
        }
        self._saved(done.step)

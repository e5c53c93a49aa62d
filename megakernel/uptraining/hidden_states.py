"""Hidden states between two blocks of layers of a frozen model, on disk."""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from megakernel.checkpoint.folder import PARTIAL, make_empty
from megakernel.checkpoint.manifest import flush
from megakernel.config import Config
from megakernel.model.layer_inputs import as_bytes
from megakernel.model.settings import DTYPES
from megakernel.parallel import Mesh
from megakernel.parallel.ranks import Ranks
from megakernel.training.deepspeed_config import micro_batches_per_step
from megakernel.training.run_folder import write_atomically

MANIFEST = "states.json"


@dataclass
class HiddenStates:
    """The input states of a layer for every micro-batch of a run, in order, in the run's dtype.

    The folder is written atomically. It has a file for each process, or one for all tensor ranks if their states are
    the same, and a manifest of what the states depend on: if any of that has changed, the states count as missing.
    """

    folder: Path
    """A folder on a file system that all ranks share."""

    config: Config
    """The run, of a single phase, whose batches are used."""

    mesh: Mesh
    _file: BinaryIO = field(init=False, repr=False)

    @property
    def per_step(self) -> int:
        """Micro-batches per step of this process."""
        return micro_batches_per_step(self.config.training, self.mesh)

    @property
    def bytes(self) -> int:
        """Total size of all files, in bytes."""
        files = self.mesh.gradient.size * (self.mesh.tp.size if self.mesh.sequence_parallel else 1)
        return self.config.training.steps * self.per_step * self._micro_batch_bytes * files

    def are_complete(self) -> bool:
        """Whether they are completely written. Called on all ranks."""
        return Ranks.of(self.mesh).on_rank_zero(self._is_whole)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context in which to `append` each micro-batch in order; they are complete at its end. Called on all ranks.

        Raises OSError, alike on all ranks, if they cannot be written; then nothing is left of them.
        """
        ranks, partial = Ranks.of(self.mesh), self._partial
        try:
            ranks.on_rank_zero(lambda: make_empty(partial))
            ranks.all(self._open)
            yield
            ranks.all(self._close)
            ranks.on_rank_zero(self._publish)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def append(self, states: Tensor) -> None:
        """Append the next micro-batch's states (N, B, C). Called on all ranks; raises OSError as `writing` does."""
        Ranks.of(self.mesh).all(lambda: self._write(states))

    def read(self, index: int) -> Tensor:
        """The states (N, B, C) of a micro-batch, counted from the run's first, on the mesh's device."""
        # Each micro-batch is mapped anew, because pages read through a mapping count as this process's memory.
        size = self._micro_batch_bytes
        data = np.memmap(self.folder / self._file_name, np.uint8, "c", index * size, (size,))
        return torch.from_numpy(data).view(self._dtype).view(self._shape).to(self.mesh.device)

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.config.training.dtype]

    @property
    def _shape(self) -> tuple[int, int, int]:
        training, mesh = self.config.training, self.mesh
        shards = mesh.cp.size * (mesh.tp.size if mesh.sequence_parallel else 1)
        return training.seq_len // shards, training.micro_batch_size, self.config.model.hidden_size

    @property
    def _micro_batch_bytes(self) -> int:
        """Size of a micro-batch of this process, in bytes."""
        return math.prod(self._shape) * self._dtype.itemsize

    @property
    def _writing_rank(self) -> int:
        """The tensor rank that writes the file that this one reads."""
        return self.mesh.tp.rank if self.mesh.sequence_parallel else 0

    @property
    def _writes(self) -> bool:
        return self._writing_rank == self.mesh.tp.rank

    @property
    def _file_name(self) -> str:
        return f"data_{self.mesh.dp.rank}_context_{self.mesh.cp.rank}_tensor_{self._writing_rank}.bin"

    @property
    def _partial(self) -> Path:
        return self.folder.with_name(self.folder.name + PARTIAL)

    def _is_whole(self) -> bool:
        try:
            return json.loads((self.folder / MANIFEST).read_text()) == self._dependencies
        except (OSError, ValueError):
            return False

    @property
    def _dependencies(self) -> dict[str, Any]:
        """What the states depend on that may change between two starts of a run."""
        training, mesh = self.config.training.model_dump(mode="json"), self.mesh
        keys = ("steps", "seq_len", "global_batch_size", "micro_batch_size", "skip_samples", "dtype")
        layout = [mesh.tp.size, mesh.cp.size, mesh.dp.size, mesh.sequence_parallel]
        return {"bytes": self.bytes, "layout": layout, **{key: training[key] for key in keys}}

    def _open(self) -> None:
        if self._writes:
            self._file = (self._partial / self._file_name).open("wb")

    def _write(self, states: Tensor) -> None:
        if self._writes:
            self._file.write(as_bytes(states).cpu().numpy().data)

    def _close(self) -> None:
        if self._writes:
            self._file.close()
            flush(self._partial / self._file_name)

    def _publish(self) -> None:
        write_atomically(self._partial / MANIFEST, json.dumps(self._dependencies))
        shutil.rmtree(self.folder, ignore_errors=True)
        self._partial.rename(self.folder)
        flush(self.folder.parent)

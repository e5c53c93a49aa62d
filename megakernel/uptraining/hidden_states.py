"""States between two layers of a frozen model, on disk: what one block of layers hands to the next."""

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

from megakernel.checkpoint.folder import PARTIAL
from megakernel.checkpoint.manifest import flush
from megakernel.config import Config
from megakernel.model.layer_inputs import as_bits, from_bits
from megakernel.model.settings import DTYPES
from megakernel.parallel import Mesh
from megakernel.parallel.ranks import Ranks
from megakernel.training.deepspeed_config import micro_batches_per_step
from megakernel.training.run_folder import write_whole

MANIFEST = "states.json"


@dataclass
class HiddenStates:
    """The states that enter a layer, of every micro-batch of a run in order, in the run's dtype.

    A folder is whole or not there. It has a file for each process, or for the tensor ranks whose states are the same,
    and a manifest of what they are states of: those of other micro-batches, sequences or layouts are not there, either.
    """

    folder: Path
    """On a file system that all ranks share."""

    config: Config
    """The run, of one phase, whose batches they are of."""

    mesh: Mesh
    _file: BinaryIO = field(init=False, repr=False)

    @property
    def per_step(self) -> int:
        """Micro-batches of a step that this process reads."""
        return micro_batches_per_step(self.config.training, self.mesh)

    @property
    def bytes(self) -> int:
        """Of all files together."""
        files = self.mesh.gradient.size * (self.mesh.tp.size if self.mesh.sequence_parallel else 1)
        return self.config.training.steps * self.per_step * self._bytes * files

    def are_there(self) -> bool:
        """Whether they were written to their end. Called on all ranks."""
        return Ranks.of(self.mesh).first(self._is_whole)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Within, `append` each micro-batch in order; behind it they are there. Called on all ranks.

        Raises OSError, alike on all ranks, where the disk does not take them; nothing is left of them then.
        """
        ranks, partial = Ranks.of(self.mesh), self._partial
        try:
            ranks.first(lambda: _emptied(partial))
            ranks.all(self._open)
            yield
            ranks.all(self._close)
            ranks.first(self._publish)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def append(self, states: Tensor) -> None:
        """Write states (N, B, C) behind those before. Called on all ranks; raises OSError, alike, as `writing` does."""
        Ranks.of(self.mesh).all(lambda: self._write(states))

    def read(self, index: int) -> Tensor:
        """The states (N, B, C) of a micro-batch, counted from the run's first, on the mesh's device."""
        # Mapped one by one: what a process has read does not stay among its pages.
        bits = np.memmap(self.folder / self._name, np.uint8, "c", index * self._bytes, (self._bytes,))
        return from_bits(torch.from_numpy(bits), self._dtype).view(self._shape).to(self.mesh.device)

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.config.training.dtype]

    @property
    def _shape(self) -> tuple[int, int, int]:
        training, mesh = self.config.training, self.mesh
        shards = mesh.cp.size * (mesh.tp.size if mesh.sequence_parallel else 1)
        return training.seq_len // shards, training.micro_batch_size, self.config.model.hidden_size

    @property
    def _bytes(self) -> int:
        """Of a micro-batch of this process."""
        return math.prod(self._shape) * self._dtype.itemsize

    @property
    def _tensor(self) -> int:
        """The tensor rank that writes what this one reads."""
        return self.mesh.tp.rank if self.mesh.sequence_parallel else 0

    @property
    def _writes(self) -> bool:
        return self._tensor == self.mesh.tp.rank

    @property
    def _name(self) -> str:
        return f"data_{self.mesh.dp.rank}_context_{self.mesh.cp.rank}_tensor_{self._tensor}.bin"

    @property
    def _partial(self) -> Path:
        return self.folder.with_name(self.folder.name + PARTIAL)

    def _is_whole(self) -> bool:
        try:
            return json.loads((self.folder / MANIFEST).read_text()) == self._of
        except (OSError, ValueError):
            return False

    @property
    def _of(self) -> dict[str, Any]:
        """What the states depend on and may change between two starts of a run."""
        training, mesh = self.config.training.model_dump(mode="json"), self.mesh
        keys = ("steps", "seq_len", "global_batch_size", "micro_batch_size", "skip_samples", "dtype")
        layout = [mesh.tp.size, mesh.cp.size, mesh.dp.size, mesh.sequence_parallel]
        return {"bytes": self.bytes, "layout": layout, **{key: training[key] for key in keys}}

    def _open(self) -> None:
        if self._writes:
            self._file = (self._partial / self._name).open("wb")

    def _write(self, states: Tensor) -> None:
        if self._writes:
            self._file.write(as_bits(states).cpu().numpy().data)

    def _close(self) -> None:
        if self._writes:
            self._file.close()
            flush(self._partial / self._name)

    def _publish(self) -> None:
        write_whole(self._partial / MANIFEST, json.dumps(self._of))
        shutil.rmtree(self.folder, ignore_errors=True)
        self._partial.rename(self.folder)
        flush(self.folder.parent)


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

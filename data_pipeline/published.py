"""Labelled tasks that others have published: read from their files, or from the hub."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from data_pipeline.document import Document
from data_pipeline.sources import Source
from megakernel.config.errors import UserError


class Published(Source):
    """A task from a folder in its published form, or from hf:NAME[:CONFIG]."""

    has_splits = True

    HUB: ClassVar[bool] = True
    """Whether a dataset of the hub is known in the task's form."""

    def __init__(self, name: str, where: str, files: Iterable[str], folder: str):
        """Look whether everything is there.

        name: of the task, as `--source` names it; where: folder or hf:NAME; files: patterns, each of which a file of
        the folder matches; folder: what the right one is called. Raises UserError where a file is missing.
        """
        super().__init__()
        if not where:
            hub = f" or {name}:hf:NAME" if self.HUB else ""
            raise UserError(f"--source {name} needs to know where the data is; write {name}:FOLDER{hub}")
        self._name, self._where = name, where
        self._from_hub = self.HUB and where.startswith("hf:")
        for pattern in () if self._from_hub else files:
            if not any(Path(where).glob(pattern)):
                raise UserError(f"--source {name}:{where} has no {pattern}; give {folder}")

    def describe(self) -> dict[str, Any]:
        """Task and where from."""
        return {"kind": self._name, "from": self._where}

    def _read(self) -> Iterator[Document]:
        return self._read_hub() if self._from_hub else self._read_files(Path(self._where))

    @abstractmethod
    def _read_files(self, folder: Path) -> Iterator[Document]:
        """All documents of a folder, with their splits."""

    def _read_hub(self) -> Iterator[Document]:
        """All documents of the hub's dataset `_where`, with their splits."""
        raise NotImplementedError

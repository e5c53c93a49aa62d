"""Published labeled tasks, read from their files or from the hub."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

from data_pipeline.document import Document
from data_pipeline.sources import DocumentSource
from megakernel.config.errors import UserError


class Published(DocumentSource):
    """A task from its published folder or from hf:NAME[:CONFIG]."""

    has_splits = True

    def __init__(
        self,
        name: str,
        where: str,
        folder: str,
        files: Mapping[str, str],
        hub: Mapping[str, str] | None = None,
    ):
        """Check that all files exist.

        name: of the task for `--source`; where: folder or hf:NAME; folder: the expected folder, for errors;
        files: file pattern in it -> prepared split; hub: split of a hub dataset -> prepared split, None if no such
        dataset is known. Raises UserError if no file matches a pattern.
        """
        super().__init__({"kind": name, "from": where})
        if not where:
            other = f" or {name}:hf:NAME" if hub else ""
            raise UserError(f"--source {name} needs to know where the data is; write {name}:FOLDER{other}")
        self._where, self._files = where, files
        self._hub = hub if where.startswith("hf:") else None
        for pattern in files if self._hub is None else ():
            if not any(Path(where).glob(pattern)):
                raise UserError(f"--source {name}:{where} has no {pattern}; give {folder}")

    def _read(self) -> Iterator[Document]:
        if self._hub is not None:
            parts = ((split, self._read_hub(published)) for published, split in self._hub.items())
        else:
            parts = (
                (split, self._read_file(file))
                for pattern, split in self._files.items()
                for file in sorted(Path(self._where).glob(pattern))
            )
        for split, documents in parts:
            for document in documents:
                yield document._replace(split=document.split or split)

    @abstractmethod
    def _read_file(self, file: Path) -> Iterator[Document]:
        """All documents of a file; those without a split get the file's."""

    def _read_hub(self, split: str) -> Iterator[Document]:
        """All documents of a split of the hub dataset `_where`."""
        raise NotImplementedError

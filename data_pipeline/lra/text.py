"""Text: movie reviews as bytes, positive or negative.

From a folder in the published form of the Large Movie Review Dataset (aclImdb): `train/pos/*.txt`, `train/neg`,
`test/pos`, `test/neg`. The arena validates on the test set and has no third one
(`lra_benchmarks/text_classification/input_pipeline.py`); so does this.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_pipeline.document import Columns, Document
from data_pipeline.sources import Source, hub_documents
from megakernel.config.errors import UserError

_SPLITS = {"train": "train", "test": "validation"}
"""As published -> as prepared."""


class Text(Source):
    """Reviews from a folder, or from a dataset of the hub with columns `text` and `label`."""

    has_splits = True

    def __init__(self, where: str):
        """where: folder, or hf:NAME. Raises UserError for a folder without reviews."""
        super().__init__()
        self._where = where
        if where.startswith("hf:"):
            return
        for split in _SPLITS:
            for label in ("neg", "pos"):
                folder = Path(where, split, label)
                if not any(folder.glob("*.txt")):
                    raise UserError(
                        f"--source lra:text:{where}: {folder} has no *.txt; give the folder aclImdb"
                    )

    def describe(self) -> dict[str, Any]:
        """Task and where from."""
        return {"kind": "lra:text", "from": self._where}

    def _read(self) -> Iterator[Document]:
        for published, split in _SPLITS.items():
            if self._where.startswith("hf:"):
                rows = hub_documents(self._where, published, Columns(("text",), "label"))
                yield from (row._replace(split=split) for row in rows)
                continue
            for number, label in enumerate(("neg", "pos")):
                for file in sorted(Path(self._where, published, label).glob("*.txt")):
                    try:
                        yield Document((file.read_text(encoding="utf-8"),), number, split)
                    except UnicodeDecodeError:
                        self.skipped["not UTF-8"] += 1

"""Text: movie reviews as bytes, positive or negative.

From a folder in the published form of the Large Movie Review Dataset (aclImdb): `train/pos/*.txt`, `train/neg`,
`test/pos`, `test/neg`. The arena validates on the test set and has no third one
(`lra_benchmarks/text_classification/input_pipeline.py`); so does this.
"""

from collections.abc import Iterator
from pathlib import Path

from data_pipeline.document import Columns, Document
from data_pipeline.published import Published
from data_pipeline.sources import hub_documents

_SPLITS = {"train": "train", "test": "validation"}
"""As published -> as prepared."""

_LABELS = ("neg", "pos")


class Text(Published):
    """Reviews from a folder, or from a dataset of the hub with columns `text` and `label`."""

    def __init__(self, where: str):
        """where: folder, or hf:NAME. Raises UserError for a folder without reviews."""
        files = [f"{split}/{label}/*.txt" for split in _SPLITS for label in _LABELS]
        super().__init__("lra:text", where, files, "the folder aclImdb")

    def _read_files(self, folder: Path) -> Iterator[Document]:
        for published, split in _SPLITS.items():
            for number, label in enumerate(_LABELS):
                for file in sorted((folder / published / label).glob("*.txt")):
                    try:
                        yield Document((file.read_text(encoding="utf-8"),), number, split)
                    except UnicodeDecodeError:
                        self.skipped["not UTF-8"] += 1

    def _read_hub(self) -> Iterator[Document]:
        for published, split in _SPLITS.items():
            for row in hub_documents(self._where, published, Columns(("text",), "label")):
                yield row._replace(split=split)

"""Text and Retrieval, both of bytes: are movie reviews positive or negative, and does one paper cite the other?

Reviews come from a folder in the published form of the Large Movie Review Dataset (aclImdb): `train/pos/*.txt`,
`train/neg`, `test/pos`, `test/neg`. The arena validates on the test set and has no third one
(`lra_benchmarks/text_classification/input_pipeline.py`); so does this.

Papers come from a folder in the form that the arena published of the ACL Anthology Network: `new_aan_pairs.train.tsv`,
`.eval.tsv` and `.test.tsv`, whose lines are label, two names and two texts between tabs, without a header and without
quoting.
"""

from collections.abc import Iterator
from pathlib import Path

from data_pipeline.document import Columns, Document
from data_pipeline.published import Published
from data_pipeline.sources import hub_documents, tsv_rows

_SPLITS = {"train": "train", "test": "validation"}
"""As published -> as prepared."""

_LABELS = ("neg", "pos")


class Text(Published):
    """Reviews from a folder, or from a dataset of the hub with columns `text` and `label`."""

    def __init__(self, where: str):
        """where: folder, or hf:NAME. Raises UserError for a folder without reviews."""
        files = {
            f"{published}/{label}/*.txt": split for published, split in _SPLITS.items() for label in _LABELS
        }
        super().__init__("lra:text", where, "the folder aclImdb", files, _SPLITS)

    def _read_file(self, file: Path) -> Iterator[Document]:
        try:
            yield Document((file.read_text(encoding="utf-8"),), _LABELS.index(file.parent.name))
        except UnicodeDecodeError:
            self.skipped["not UTF-8"] += 1

    def _read_hub(self, split: str) -> Iterator[Document]:
        return hub_documents(self._where, split, Columns(("text",), "label"))


_FILES = {
    "new_aan_pairs.train.tsv": "train",
    "new_aan_pairs.eval.tsv": "validation",
    "new_aan_pairs.test.tsv": "test",
}


class Retrieval(Published):
    """Pairs of papers."""

    def __init__(self, where: str):
        """where: folder. Raises UserError where one of the files is missing."""
        super().__init__("lra:retrieval", where, "the folder tsv_data of the arena's release", _FILES)

    def _read_file(self, file: Path) -> Iterator[Document]:
        for row in tsv_rows(file, ("label", "id1", "id2", "text1", "text2"), headed=False):
            if row is None or row["label"] not in ("0", "1", "0.0", "1.0"):
                self.skipped["no pair of papers"] += 1
            else:
                yield Document((row["text1"], row["text2"]), int(float(row["label"])))

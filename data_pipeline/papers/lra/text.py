"""Text and Retrieval, both on bytes: is a movie review positive, and does one paper cite the other?

Reviews are read from the published folder of the Large Movie Review Dataset (aclImdb): `train/pos/*.txt`, `train/neg`,
`test/pos`, `test/neg`. As in the arena (`lra_benchmarks/text_classification/input_pipeline.py`), the test set is for
validation, and there is no third set.

Papers are read from the arena's files of the ACL Anthology Network: `new_aan_pairs.train.tsv`, `.eval.tsv` and
`.test.tsv`, unquoted and tab-separated, without a header: label, two names, two texts.
"""

from collections.abc import Iterator
from pathlib import Path

from data_pipeline.document import Columns, Document
from data_pipeline.papers.published import Published
from data_pipeline.sources import hub_documents, tsv_rows

_SPLITS = {"train": "train", "test": "validation"}
"""Published split -> prepared split."""

_LABELS = ("neg", "pos")


class MovieReviews(Published):
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
        """where: folder. Raises UserError if a file is missing."""
        super().__init__("lra:retrieval", where, "the folder tsv_data of the arena's release", _FILES)

    def _read_file(self, file: Path) -> Iterator[Document]:
        for row in tsv_rows(file, ("label", "id1", "id2", "text1", "text2"), has_header=False):
            if row is None or row["label"] not in ("0", "1", "0.0", "1.0"):
                self.skipped["no pair of papers"] += 1
            else:
                yield Document((row["text1"], row["text2"]), int(float(row["label"])))

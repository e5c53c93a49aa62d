"""Retrieval: two papers as bytes; does one cite the other?

From a folder in the form that the arena published of the ACL Anthology Network: `new_aan_pairs.train.tsv`, `.eval.tsv`
and `.test.tsv`, whose lines are label, two names and two texts between tabs, without a header and without quoting.
"""

from collections.abc import Iterator
from pathlib import Path

from data_pipeline.document import Document
from data_pipeline.published import Published

_FILES = {
    "train": "new_aan_pairs.train.tsv",
    "validation": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}


class Retrieval(Published):
    """Pairs of papers."""

    HUB = False

    def __init__(self, where: str):
        """where: folder. Raises UserError where one of the files is missing."""
        super().__init__(
            "lra:retrieval", where, _FILES.values(), "the folder tsv_data of the arena's release"
        )

    def _read_files(self, folder: Path) -> Iterator[Document]:
        for split, name in _FILES.items():
            with (folder / name).open("rb") as lines:
                for line in lines:
                    document = _pair(line)
                    if document is None:
                        self.skipped["no pair of papers"] += 1
                    else:
                        yield document._replace(split=split)


def _pair(line: bytes) -> Document | None:
    """None where a line is not UTF-8, or has other fields."""
    try:
        fields = line.decode().rstrip("\r\n").split("\t")
    except UnicodeDecodeError:
        return None
    if len(fields) != 5 or fields[0] not in ("0", "1", "0.0", "1.0"):
        return None
    return Document((fields[3], fields[4]), int(float(fields[0])))

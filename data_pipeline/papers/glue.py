"""GLUE (Wang et al. 2018): nine tasks of one or two sentences, from the published files or from the hub.

A folder holds a task as in the benchmark's archive: `train.tsv` and `dev.tsv` (MNLI: `dev_matched.tsv` and
`dev_mismatched.tsv`), unquoted and tab-separated, with a header line except for CoLA. `dev` becomes the validation
split, MNLI's second one `validation_mismatched`. The published test sets have no labels and are not read.

Two sentences become one token sequence with end-of-document after each, as BERT reads them with its separator.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from data_pipeline.document import Columns, Document, Label
from data_pipeline.papers.published import Published
from data_pipeline.sources import hub_documents, parse_class, tsv_names, tsv_rows
from megakernel.config.errors import UserError


@dataclass(frozen=True)
class GlueTask:
    """The published format of one task."""

    texts: tuple[str, ...]
    """Columns with sentences in the files."""

    label: str
    """Column with the label in the files."""

    hub_texts: tuple[str, ...]
    """Columns with sentences in the hub's dataset, whose labels are in `label`."""

    names: tuple[str, ...] = ()
    """Columns of files without a header line."""

    numbers: bool = False
    """Whether the task is a regression, with numbers as labels."""

    splits: dict[str, str] = field(default_factory=lambda: {"train": "train", "dev": "validation"})
    """File name without .tsv -> prepared split, which is also the hub's name except for `hub_splits`."""

    hub_splits: dict[str, str] = field(default_factory=dict)
    """Prepared split -> the hub's name."""


_PAIR = ("sentence1", "sentence2")

TASKS = {
    "cola": GlueTask(("sentence",), "label", ("sentence",), names=("source", "label", "star", "sentence")),
    "sst2": GlueTask(("sentence",), "label", ("sentence",)),
    "mrpc": GlueTask(("#1 String", "#2 String"), "Quality", _PAIR),
    "qqp": GlueTask(("question1", "question2"), "is_duplicate", ("question1", "question2")),
    "stsb": GlueTask(_PAIR, "score", _PAIR, numbers=True),
    "mnli": GlueTask(
        _PAIR,
        "gold_label",
        ("premise", "hypothesis"),
        splits={"train": "train", "dev_matched": "validation", "dev_mismatched": "validation_mismatched"},
        hub_splits={"validation": "validation_matched"},
    ),
    "qnli": GlueTask(("question", "sentence"), "label", ("question", "sentence")),
    "rte": GlueTask(_PAIR, "label", _PAIR),
    "wnli": GlueTask(_PAIR, "label", _PAIR),
}


class Glue(Published):
    """The labeled sentences of one task."""

    def __init__(self, task: str, where: str):
        """task: of TASKS; where: folder, or hf:NAME[:CONFIG]. Raises UserError if a file is missing."""
        self._task = TASKS[task]
        files = {f"{name}.tsv": split for name, split in self._task.splits.items()}
        hub = {self._task.hub_splits.get(split, split): split for split in self._task.splits.values()}
        super().__init__(f"glue:{task}", where, "the task's folder of GLUE", files, hub)

    def _read_hub(self, split: str) -> Iterator[Document]:
        columns = Columns(self._task.hub_texts, "label", self._task.numbers)
        for row in hub_documents(self._where, split, columns):
            yield row._replace(joined=True)

    def _read_file(self, file: Path) -> Iterator[Document]:
        task = self._task
        names = task.names or tsv_names(file)
        if missing := [name for name in (*task.texts, task.label) if name not in names]:
            raise UserError(
                f"{file} has no column {missing[0]!r} among {', '.join(names)}; give the file of GLUE"
            )
        for row in tsv_rows(file, names, has_header=not task.names):
            if row is None or (label := self._label(row[task.label])) is None:
                self.skipped["no labeled sentences"] += 1
            else:
                yield Document(tuple(row[name] for name in task.texts), label, joined=True)

    def _label(self, text: str) -> Label | float | None:
        """A class, a number, or None for neither. MNLI writes - if its annotators did not agree."""
        if self._task.numbers:
            try:
                number = float(text)
            except ValueError:
                return None
            return number if math.isfinite(number) else None
        return None if text in ("", "-") else parse_class(text)

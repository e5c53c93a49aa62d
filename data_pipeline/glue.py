"""GLUE (Wang et al. 2018): nine tasks of one or two sentences, from the published files or from the hub.

A folder holds a task as the benchmark's own archive does: `train.tsv` and `dev.tsv` (of MNLI `dev_matched.tsv` and
`dev_mismatched.tsv`), fields between tabs, unquoted, under a line of names; CoLA alone has none. `dev` becomes the
validation split, MNLI's second one `validation_mismatched`. The published test sets have no labels, and are not read.

Two sentences become one sequence of tokens, an end of document behind each, as BERT reads them with its separator.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from data_pipeline.document import Columns, Document, Label
from data_pipeline.published import Published
from data_pipeline.sources import class_of, hub_documents, tsv_names, tsv_rows
from megakernel.config.errors import UserError


@dataclass(frozen=True)
class GlueTask:
    """How one task is published."""

    texts: tuple[str, ...]
    """Columns of the files that hold sentences."""

    label: str
    """Column of the files that holds the label."""

    hub_texts: tuple[str, ...]
    """Columns of the hub's dataset, whose labels are in `label`."""

    names: tuple[str, ...] = ()
    """Columns of files without a line of names."""

    numbers: bool = False
    """Labels are numbers, and the task is a regression."""

    splits: dict[str, str] = field(default_factory=lambda: {"train": "train", "dev": "validation"})
    """File without .tsv -> split as prepared, which is the hub's name for it but for `hub_splits`."""

    hub_splits: dict[str, str] = field(default_factory=dict)
    """Split as prepared -> the hub's name."""


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
    """The labelled sentences of one task."""

    def __init__(self, task: str, where: str):
        """task: of TASKS; where: folder, or hf:NAME[:CONFIG]. Raises UserError where a file is missing."""
        self._form = form = TASKS[task]
        files = {f"{name}.tsv": split for name, split in form.splits.items()}
        hub = {form.hub_splits.get(split, split): split for split in form.splits.values()}
        super().__init__(f"glue:{task}", where, "the task's folder of GLUE", files, hub)

    def _read_hub(self, split: str) -> Iterator[Document]:
        columns = Columns(self._form.hub_texts, "label", self._form.numbers)
        for row in hub_documents(self._where, split, columns):
            yield row._replace(joined=True)

    def _read_file(self, file: Path) -> Iterator[Document]:
        form = self._form
        names = form.names or tsv_names(file)
        if missing := [name for name in (*form.texts, form.label) if name not in names]:
            raise UserError(
                f"{file} has no column {missing[0]!r} among {', '.join(names)}; give the file of GLUE"
            )
        for row in tsv_rows(file, names, headed=not form.names):
            if row is None or (label := self._label(row[form.label])) is None:
                self.skipped["no labelled sentences"] += 1
            else:
                yield Document(tuple(row[name] for name in form.texts), label, joined=True)

    def _label(self, text: str) -> Label | float | None:
        """A class, a number, or None for neither. MNLI writes - where its annotators did not agree."""
        if self._form.numbers:
            try:
                return float(text)
            except ValueError:
                return None
        return None if text in ("", "-") else class_of(text)

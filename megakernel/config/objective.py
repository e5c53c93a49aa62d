"""The objective section: the loss, and the teacher of distillation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from .errors import Problem
from .section import Section

_KEYS = {
    "teacher": ("distill", "transfer"),
    "kl": ("distill",),
    "cross_entropy": ("distill", "transfer"),
    "temperature": ("distill",),
    "rows": ("transfer",),
}
"""Key -> kinds that use it."""


class Objective(Section):
    """The training loss: cross entropy of the labels, with or without distillation from a teacher."""

    kind: Literal["labels", "distill", "transfer"] = "labels"
    """`labels`: cross entropy; `distill`: also KL to a teacher's logits; `transfer`: only match the teacher's
    attention outputs, layer by layer."""

    teacher: Path | None = None
    """Run, checkpoint or dense model to learn from; it stays frozen. Required by distill and transfer."""

    kl: float = Field(default=1.0, ge=0)
    """distill: weight of KL(teacher ‖ model) over the vocabulary, above 0."""

    cross_entropy: float = Field(default=1.0, ge=0)
    """distill: weight of the labels' cross entropy; transfer: weight of the cross entropy of sampled attention rows."""

    temperature: float = Field(default=1.0, gt=0)
    """distill: divides the logits of teacher and model; KL is multiplied by its square."""

    rows: int = Field(default=0, ge=0)
    """transfer: sampled queries per sequence whose attention weights are compared too; 0: compare outputs only."""

    def problems(self) -> Iterator[Problem]:
        """A missing teacher, and keys without effect on this kind."""
        if self.kind != "labels" and self.teacher is None:
            remedy = "give the folder of a run or of a dense model"
            yield self.problem("teacher", f"is missing beside kind: {self.kind}", remedy)
        yield from self.without_effect("kind", _KEYS)
        if self.kind == "distill" and self.kl == self.cross_entropy == 0:
            yield Problem("kl", 0.0, "leaves nothing to learn beside cross_entropy=0", "set one above 0")

"""The objective section: what training lowers, and the teacher it may learn from."""

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
"""Key -> the kinds that have a use for it."""


class Objective(Section):
    """What training lowers: the cross entropy of the labels, or also the distance to a teacher."""

    kind: Literal["labels", "distill", "transfer"] = "labels"
    """labels; distill: a teacher's probabilities, too; transfer: each layer's attention as the teacher's alone."""

    teacher: Path | None = None
    """Run, checkpoint or dense model to learn from; its weights are never changed."""

    kl: float = Field(default=1.0, ge=0)
    """distill: weight of KL(teacher || model) over the vocabulary."""

    cross_entropy: float = Field(default=1.0, ge=0)
    """distill: weight of the labels' cross entropy; transfer: of that of the sampled queries' weights."""

    temperature: float = Field(default=1.0, gt=0)
    """distill: both sides' logits are divided by it, and KL is multiplied by its square."""

    rows: int = Field(default=0, ge=0)
    """transfer: sampled queries of each sequence whose weights are compared with the teacher's; 0: outputs alone."""

    def problems(self) -> Iterator[Problem]:
        """A teacher where one is needed, and keys that the kind has a use for."""
        if self.kind != "labels" and self.teacher is None:
            remedy = "give the folder of a run or of a dense model"
            yield self.problem("teacher", f"is missing beside kind: {self.kind}", remedy)
        yield from self.without_effect("kind", _KEYS)
        if self.kind == "distill" and self.kl == self.cross_entropy == 0:
            yield Problem("kl", 0.0, "leaves nothing to learn beside cross_entropy=0", "set one above 0")

"""Synthetic tasks of any length that measure what a model retrieves from its context."""

from .counting import CommonWords, FrequentWords
from .haystack import Needle, Passkey, Variables
from .recall import Copy, Induction, Mqar
from .task import EVALUATION, TRAINING, Example, SyntheticTask

KINDS: tuple[type[SyntheticTask], ...] = (
    Passkey,
    Needle,
    Mqar,
    Copy,
    Induction,
    Variables,
    CommonWords,
    FrequentWords,
)

TASKS = {kind.NAME: kind for kind in KINDS}
"""Name -> class; its fields are the task's options."""

__all__ = ["EVALUATION", "TASKS", "TRAINING", "Example", "SyntheticTask"]

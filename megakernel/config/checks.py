"""The rules of `rules.py`, held against the sections that are at hand."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from . import rules
from .errors import Problem
from .training import Training

RULES = [
    rule
    for rule in vars(rules).values()
    if inspect.isfunction(rule) and rule.__annotations__["return"] == Iterator[Problem]
]
"""In the order in which they are written."""


def agreement(sections: Mapping[str, Any]) -> Iterator[Problem]:
    """The problems of every rule whose sections are at hand, and those that only longer sequences of uptrain have."""
    found = list(_disagreements(sections))
    yield from found
    yield from longer_rows(sections, found)


def _disagreements(sections: Mapping[str, Any]) -> Iterator[Problem]:
    for rule in RULES:
        names = inspect.signature(rule).parameters
        if all(name in sections for name in names):
            yield from rule(*(sections[name] for name in names))


def longer_rows(sections: Mapping[str, Any], known: Iterable[Problem]) -> Iterator[Problem]:
    """The problems, besides those `known`, of a configuration whose sequences are those of uptrain.length.

    What uptrain.length sets is named by its keys there.
    """
    uptrain, model, training = (sections.get(name) for name in ("uptrain", "model", "training"))
    if uptrain is None or uptrain.length is None or model is None or training is None:
        return
    written = {
        name: value for name, value in uptrain.length if name in Training.model_fields and value is not None
    }
    keys = {f"training.{name}": f"uptrain.length.{name}" for name in written}
    if (rope_scaling := uptrain.length.rope_scaling) is not None:
        keys["model.rope_scaling"] = "uptrain.length.rope_scaling"
        model = model.model_copy(update={"rope_scaling": rope_scaling})
    training = training.model_copy(update=written)
    found = [problem.under("training") for problem in training.problems()]
    found += [problem.under("model") for problem in model.problems()]
    found += _disagreements({**sections, "model": model, "training": training, "uptrain": None})
    for problem in found:
        if problem not in known:
            texts = {name: getattr(problem, name) for name in ("key", "reason", "remedy")}
            for key, own in keys.items():
                texts = {name: re.sub(rf"\b{re.escape(key)}\b", own, text) for name, text in texts.items()}
            yield replace(problem, **texts)

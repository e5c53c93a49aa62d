"""Runs the rules of `rules.py` on the sections that are valid so far."""

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
"""All rules, in the order of `rules.py`."""


def section_conflicts(sections: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of every rule whose sections are present, and those that arise only at the lengths of uptrain.length."""
    problems = list(_rule_problems(sections))
    yield from problems
    yield from _length_stage_conflicts(sections, problems)


def _rule_problems(sections: Mapping[str, Any]) -> Iterator[Problem]:
    for rule in RULES:
        names = inspect.signature(rule).parameters
        if all(name in sections for name in names):
            yield from rule(*(sections[name] for name in names))


def _length_stage_conflicts(sections: Mapping[str, Any], known: Iterable[Problem]) -> Iterator[Problem]:
    """Problems, besides those `known`, of the configuration with the sequence lengths of uptrain.length.

    Keys that uptrain.length overrides appear as `uptrain.length.KEY`.
    """
    uptrain, model, training = (sections.get(name) for name in ("uptrain", "model", "training"))
    if uptrain is None or uptrain.length is None or model is None or training is None:
        return
    changes = {
        name: value for name, value in uptrain.length if name in Training.model_fields and value is not None
    }
    keys = {f"training.{name}": f"uptrain.length.{name}" for name in changes}
    if (rope_scaling := uptrain.length.rope_scaling) is not None:
        keys["model.rope_scaling"] = "uptrain.length.rope_scaling"
        model = model.model_copy(update={"rope_scaling": rope_scaling})
    training = training.model_copy(update=changes)
    problems = [problem.under("training") for problem in training.problems()]
    problems += [problem.under("model") for problem in model.problems()]
    problems += _rule_problems({**sections, "model": model, "training": training, "uptrain": None})
    for problem in problems:
        if problem not in known:
            texts = {name: getattr(problem, name) for name in ("key", "reason", "remedy")}
            for key, stage_key in keys.items():
                pattern = rf"\b{re.escape(key)}\b"
                texts = {name: re.sub(pattern, stage_key, text) for name, text in texts.items()}
            yield replace(problem, **texts)

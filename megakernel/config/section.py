"""The base of every configuration section, and laying one tree of keys over another."""

import operator
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from .errors import ConfigError, Problem

_INT64_MAX = 2**63 - 1
_FLOAT32_MAX, _FLOAT32_TINY = 3.4028234e38, 1.1754944e-38
"""Largest and smallest normal magnitudes."""


class Section(BaseModel):
    """A frozen group of keys; unknown keys are errors and a field's docstring is its help text.

    Numbers are finite, unless a field has allow_inf_nan; integers fit 64 bits, others float32; true is none of them.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        validate_default=True,
        allow_inf_nan=False,
    )

    def problems(self) -> Iterator[Problem]:
        """What this section's keys contradict in each other; keys are relative to the section."""
        yield from ()

    def problem(self, key: str, reason: str, remedy: str) -> Problem:
        """One of `problems`, with the value that stands at `key`."""
        value = operator.attrgetter(key)(self)
        return Problem(key, "{...}" if isinstance(value, Section) else value, reason, remedy)

    def without_effect(self, choice: str, takers: Mapping[str, tuple[str, ...]]) -> Iterator[Problem]:
        """Problems of keys that are set beside a choice that has no use for them.

        takers: key -> the choices that have.
        """
        chosen = getattr(self, choice)
        for key, choices in takers.items():
            if chosen not in choices and self.sets(key):
                remedy = f"remove it or take {choice}: {' or '.join(choices)}"
                yield self.problem(key, f"has no effect on {choice}: {chosen}", remedy)

    def sets(self, key: str) -> bool:
        """Whether a key has another value than its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    @field_validator("*", mode="before")
    @classmethod
    def _takes_no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if any(isinstance(item, bool) for item in _items(value)):
            types = set(plain_types(cls.model_fields[str(info.field_name)].annotation))
            if types & {int, float} and bool not in types:
                raise ValueError("should be a number")
        return value

    @field_validator("*")
    @classmethod
    def _fits_what_it_becomes(cls, value: Any) -> Any:
        for item in _items(value):
            check_magnitude(item)
        return value

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "Section":
        problems = list(self.problems())
        if problems:
            raise ConfigError(problems)
        return self


def check_magnitude(number: Any) -> None:
    """ValueError for a number that no tensor holds; infinity is left to whoever allows it."""
    if isinstance(number, int) and abs(number) > _INT64_MAX:
        raise ValueError("is beyond 64 bits")
    if isinstance(number, float) and _FLOAT32_MAX < abs(number) < float("inf"):
        raise ValueError("is beyond the float32 that it becomes")
    if isinstance(number, float) and 0 < abs(number) < _FLOAT32_TINY:
        raise ValueError("is 0 as the float32 that it becomes")


def _items(value: Any) -> Iterator[Any]:
    """The values inside lists, however deep."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _items(item)
    else:
        yield value


def plain_types(annotation: Any) -> Iterator[Any]:
    """The plain types in an annotation; of a literal, those of its choices."""
    parts = get_args(annotation)
    if not parts:
        yield annotation if isinstance(annotation, type) else type(annotation)
    for part in parts:
        yield from plain_types(part)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it: mappings merge key by key, every other value replaces."""
    out = dict(base)
    for key, item in changes.items():
        under = out.get(key)
        out[key] = merged(under, item) if isinstance(item, Mapping) and isinstance(under, Mapping) else item
    return out

"""Base class of configuration sections, and merging of trees of keys."""

import operator
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from .errors import ConfigError, Problem

_INT64_MAX = 2**63 - 1
_MAX_NAME_BYTES = 255
"""Bytes of a file name on Linux file systems."""
_FLOAT32_MAX, _FLOAT32_TINY = 3.4028234e38, 1.1754944e-38
"""Largest and smallest normal magnitudes."""


class Section(BaseModel):
    """A frozen group of keys; unknown keys are errors, and a field's docstring is its help text.

    Integers fit int64, other numbers float32; infinity needs allow_inf_nan, and booleans are not accepted as numbers.
    Paths may begin with `~`, the home folder.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        validate_default=True,
        allow_inf_nan=False,
    )

    is_internal: ClassVar[bool] = False
    """Whether programs set its keys and users do not: no help lists it."""

    moved: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Each earlier key and the section in here that has it now, under the same name: old files and exports load."""

    @classmethod
    def users_keys(cls) -> dict[str, FieldInfo]:
        """The keys that help lists, with their fields."""
        return {
            name: field
            for name, field in cls.model_fields.items()
            if not any(
                isinstance(kind, type) and issubclass(kind, Section) and kind.is_internal
                for kind in plain_types(field.annotation)
            )
        }

    @classmethod
    def with_moved(cls, value: Any) -> Any:
        """A tree of this section with `moved` keys in their present places. ConfigError for a key in both of them."""
        if not isinstance(value, Mapping):
            return value
        out = dict(value)
        for key, place in cls.moved:
            inner = out.get(place) or {}
            if isinstance(inner, Section):
                inner = inner.model_dump()
            if key not in out or not isinstance(inner, Mapping):  # what is no mapping is reported as such
                continue
            item, default = out.pop(key), getattr(cls.model_fields[place].default, key)
            if inner.get(key, default) not in (default, item):
                reason = f"is also {place}.{key}={inner[key]}"
                raise ConfigError([Problem(key, item, reason, f"leave out {key}, its earlier place")])
            out[place] = {**inner, key: item}
        return out

    @model_validator(mode="before")
    @classmethod
    def _move(cls, value: Any) -> Any:
        return cls.with_moved(value)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        for field in cls.model_fields.values():
            field.description = in_yaml_words(field.description or "") or None

    def problems(self) -> Iterator[Problem]:
        """Problems of this section's keys with each other; keys are relative to the section."""
        yield from ()

    def problem(self, key: str, reason: str, remedy: str) -> Problem:
        """A problem of `key` with its present value."""
        value = operator.attrgetter(key)(self)
        return Problem(key, "{...}" if isinstance(value, Section) else value, reason, remedy)

    def without_effect(self, choice: str, used_by: Mapping[str, tuple[str, ...]]) -> Iterator[Problem]:
        """Problems of keys that are set although the value of key `choice` does not use them.

        used_by: key -> values of `choice` that use it.
        """
        chosen = getattr(self, choice)
        for key, choices in used_by.items():
            if chosen not in choices and self.is_set(key):
                remedy = f"remove it or take {choice}: {' or '.join(choices)}"
                yield self.problem(key, f"has no effect on {choice}: {chosen}", remedy)

    def is_set(self, key: str) -> bool:
        """Whether a key's value differs from its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    @field_validator("*", mode="before")
    @classmethod
    def _reject_booleans_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if any(isinstance(item, bool) for item in _items(value)):
            types = set(plain_types(cls.model_fields[str(info.field_name)].annotation))
            if types & {int, float} and bool not in types:
                raise ValueError("should be a number")
        return value

    @field_validator("*")
    @classmethod
    def _check_path(cls, value: Any) -> Any:
        if not isinstance(value, Path):
            return value
        if "\0" in (text := str(value)):
            raise ConfigError([Problem("", text.replace("\0", "\\0"), "holds a NUL character", "remove it")])
        if any(len(part.encode(errors="replace")) > _MAX_NAME_BYTES for part in value.parts):
            reason = f"has a name of more than {_MAX_NAME_BYTES} bytes"
            raise ConfigError([Problem("", value, reason, "shorten it")])
        # A shell does not expand `~` behind `run.root=`, nor in a file; a folder of that name would be made.
        return Path(os.path.expanduser(value))

    @field_validator("*")
    @classmethod
    def _check_magnitudes(cls, value: Any) -> Any:
        for item in _items(value):
            check_magnitude(item)
        return value

    @model_validator(mode="after")
    def _raise_problems(self) -> "Section":
        problems = list(self.problems())
        if problems:
            raise ConfigError(problems)
        return self


def in_yaml_words(text: str) -> str:
    """A docstring as help prints it: on one line, in YAML's words."""
    return re.sub(r"\bNone\b", "null", " ".join(text.split()))


def check_magnitude(number: Any) -> None:
    """Raise ValueError for a number out of range of int64 or normal float32; infinity passes."""
    if isinstance(number, int) and abs(number) > _INT64_MAX:
        raise ValueError("is beyond 64 bits")
    if isinstance(number, float) and _FLOAT32_MAX < abs(number) < float("inf"):
        raise ValueError("is out of range for float32")
    if isinstance(number, float) and 0 < abs(number) < _FLOAT32_TINY:
        raise ValueError("is 0 in float32")


def _items(value: Any) -> Iterator[Any]:
    """The values inside nested lists and tuples, or the value itself."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _items(item)
    else:
        yield value


def plain_types(annotation: Any) -> Iterator[Any]:
    """The classes in an annotation; for a Literal, those of its choices."""
    parts = get_args(annotation)
    if not parts:
        yield annotation if isinstance(annotation, type) else type(annotation)
    for part in parts:
        yield from plain_types(part)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` merged over `base`: mappings merge key by key, other values replace."""
    out = dict(base)
    for key, item in changes.items():
        under = out.get(key)
        out[key] = merged(under, item) if isinstance(item, Mapping) and isinstance(under, Mapping) else item
    return out

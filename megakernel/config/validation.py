"""Validates a tree of plain values into a `Config`, or reports every problem at once."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from .checks import section_conflicts
from .errors import MISSING, ConfigError, Problem, nearest_first
from .section import Section, plain_types
from .tree import Config

S = TypeVar("S", bound=Section)


def validate(tree: Mapping[str, Any], known_problems: Sequence[Problem] = ()) -> Config:
    """The configuration of a tree; ConfigError lists `known_problems` and all that are found.

    Sections are validated one by one, so that an invalid one hides no conflict between the others.
    """
    sections: dict[str, Any] = {}
    problems = [
        _unknown_key(Config, str(key), str(key), tree[key]) for key in tree if key not in Config.model_fields
    ]
    for name, field in Config.model_fields.items():
        if name not in tree and not field.is_required():
            sections[name] = field.get_default(call_default_factory=True)
            continue
        if name in tree and tree[name] is None and field.default is None:
            sections[name] = None
            continue
        value = {} if tree.get(name) is None else tree[name]
        annotation: Any = field.annotation
        try:
            if (kind := section_in(annotation)) is not None:
                value = kind.with_moved(value)  # so that errors name present keys
            sections[name] = TypeAdapter(annotation).validate_python(value)
        except ConfigError as error:
            problems += (problem.under(name) for problem in error.problems)
        except ValidationError as error:
            for detail in error.errors():
                problems += (problem.under(name) for problem in _problems_of_error(detail, annotation, value))
    problems += section_conflicts(sections)
    _raise_problems(known_problems, problems)
    return Config.model_construct(**sections)  # valid one by one and together


def validate_section(
    kind: type[S], value: Mapping[str, Any], name: str = "", known_problems: Sequence[Problem] = ()
) -> S:
    """A section outside of a `Config`; ConfigError lists `known_problems` and all that are found, keys under `name`."""
    problems: list[Problem] = []
    try:
        section = kind.model_validate(value)
    except ValidationError as error:
        problems = [
            problem for detail in error.errors() for problem in _problems_of_error(detail, kind, value)
        ]
    _raise_problems(known_problems, problems, name)
    return section


def _raise_problems(known: Sequence[Problem], found: Sequence[Problem], name: str = "") -> None:
    """Raise ConfigError if there are problems; a key that is `known` is not reported again."""
    already = {problem.key for problem in known}
    problems = [*known, *(problem for problem in found if problem.key not in already)]
    if problems:
        raise ConfigError([problem.under(name) for problem in problems])


def all_texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) for every text in a tree."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping | list):
        for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from all_texts(inner, f"{key}.{name}" if key else str(name))


def _problems_of_error(detail: ErrorDetails, annotation: Any, value: Any) -> Iterator[Problem]:
    """One pydantic error of a section as problems; keys are relative to the section."""
    kind, wrong = detail["type"], detail["input"]
    path = _path_in(value, detail["loc"], ends_missing=kind == "missing")
    key = ".".join(map(str, path))
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        yield from (problem.under(key) for problem in cause.problems)
        return
    owner = _section_at(annotation, path[:-1])
    help_text = ""
    if owner is not None and path and path[-1] in owner.model_fields:
        help_text = f" ({(owner.model_fields[str(path[-1])].description or '').split('. ')[0].rstrip('.')})"
    if kind == "extra_forbidden" and owner is not None:
        yield _unknown_key(owner, key, str(path[-1]), wrong)
    elif kind == "missing":
        yield Problem(key, MISSING, "is missing", f"add it{help_text}")
    elif kind == "literal_error" and isinstance(wrong, str):
        choices = detail["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        yield Problem(key, wrong, "is none of the choices", f"choose {nearest_first(wrong, choices)}")
    elif kind in ("model_type", "dict_type"):
        yield Problem(key, wrong, "should be a mapping of keys", f"write its keys below it{help_text}")
    elif kind == "string_type":
        yield Problem(key, wrong, "should be text", f"write it in quotes{help_text}")
    else:
        reason = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
        yield Problem(key, wrong, reason[0].lower() + reason[1:], f"change it{help_text}")


def _path_in(value: Any, location: Sequence[int | str], ends_missing: bool) -> list[int | str]:
    """Keys of a pydantic location, without the union branches that it also contains."""
    path: list[int | str] = []
    for index, part in enumerate(location):
        is_missing = ends_missing and index == len(location) - 1
        if isinstance(value, Mapping) and (part in value or is_missing):
            path.append(part)
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            path.append(part)
            value = value[part]
    return path


def _section_at(annotation: Any, path: Sequence[int | str]) -> type[Section] | None:
    """The section class at `path` below a value of type `annotation`."""
    section = section_in(annotation)
    for part in path:
        if isinstance(part, str) and section is not None:
            field = section.model_fields.get(part)
            section = section_in(field.annotation) if field is not None else None
    return section


def section_in(annotation: Any) -> type[Section] | None:
    """The section class in an annotation, such as an optional section or a list of sections."""
    return next((part for part in plain_types(annotation) if issubclass(part, Section)), None)


def _unknown_key(owner: type[Section], dotted: str, key: str, value: Any) -> Problem:
    """Problem of an unknown key, with the most similar key of its section, else one of the same name elsewhere."""
    near = difflib.get_close_matches(key, owner.users_keys(), n=1, cutoff=0.6)
    if near:
        remedy = f"did you mean {near[0]}?"
    elif elsewhere := [name for name in all_keys(Config) if name.rpartition(".")[2] == key]:
        remedy = f"did you mean {elsewhere[0]}?"
    else:
        remedy = f"known here: {', '.join(owner.users_keys())}"
    return Problem(dotted, value, "is an unknown key", remedy)


def all_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a section that help lists, those of nested sections included."""
    for name, field in section.users_keys().items():
        yield prefix + name
        inner = section_in(field.annotation)
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{name}.")

"""`NAME:key=value,...`: how a task is named on the command line."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from megakernel.config.errors import UserError, nearest_first
from megakernel.config.section import Section
from megakernel.config.validation import validate_section
from megakernel.config.yaml_text import parse

S = TypeVar("S", bound=Section)


def split(spec: str, option: str) -> tuple[str, dict[str, str]]:
    """The name of a task, and the text of each of its options.

    option: what the spec was given to, for errors. Raises UserError for what is no `key=value`.
    """
    name, colon, rest = spec.partition(":")
    return name, options_of(name, rest, option) if colon else {}


def options_of(name: str, text: str, option: str) -> dict[str, str]:
    """The text of each option of a task, of `key=value,...` behind its name. Raises UserError as `split` does."""
    texts: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if not (key and equals and value):
            raise UserError(
                f"{option} {name}:{text}: {item!r} is no key=value; write {name}:key=value,key=value"
            )
        if key in texts:
            raise UserError(f"{option} {name}:{text}: {key} is written twice; keep one of them")
        texts[key] = value
    return texts


def kind_of(name: str, kinds: Mapping[str, type[S]], option: str) -> type[S]:
    """The class of a task; UserError for a name that none has."""
    if name not in kinds:
        raise UserError(f"{option} {name} is no task; choose {nearest_first(name, kinds)}")
    return kinds[name]


def make(kind: type[S], name: str, texts: Mapping[str, str], option: str) -> S:
    """A task with options, each a YAML value. UserError for one that it does not have or take."""
    check_known(name, texts, kind.model_fields, option)
    tree: dict[str, Any] = {key: parse(text, f"{option} {name}") for key, text in texts.items()}
    return validate_section(kind, tree, f"{option} {name}")


def check_known(name: str, texts: Mapping[str, str], known: Iterable[str], option: str) -> None:
    """UserError for an option that the task does not have."""
    known = list(known)
    for key, text in texts.items():
        if key not in known:
            raise UserError(
                f"{option} {name}:{key}={text}: {name} has no option {key}; choose {nearest_first(key, known)}"
            )

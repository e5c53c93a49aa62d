"""`NAME:key=value,...`: the command line's syntax for tasks with options."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from megakernel.config.errors import UserError, nearest_first
from megakernel.config.section import Section
from megakernel.config.validation import validate_section
from megakernel.config.yaml_text import parse

S = TypeVar("S", bound=Section)


def split_spec(spec: str, option: str) -> tuple[str, dict[str, str]]:
    """The name of a task, and the text of each of its options.

    option: the command-line option of the spec, for errors. Raises UserError for an item that is not `key=value`.
    """
    name, colon, rest = spec.partition(":")
    return name, parse_options(name, rest, option) if colon else {}


def parse_options(name: str, text: str, option: str) -> dict[str, str]:
    """Option -> text of the `key=value,...` that follows a task's name. Raises UserError as `split_spec` does."""
    texts: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if not (key and equals and value):
            raise UserError(
                f"{option} {name}:{text}: {item!r} is not key=value; write {name}:key=value,key=value"
            )
        if key in texts:
            raise UserError(f"{option} {name}:{text}: {key} is written twice; keep one of them")
        texts[key] = value
    return texts


def find_class(name: str, kinds: Mapping[str, type[S]], option: str) -> type[S]:
    """The class of a task; UserError for an unknown name."""
    if name not in kinds:
        raise UserError(f"{option} {name} is not a task; choose {nearest_first(name, kinds)}")
    return kinds[name]


def build(kind: type[S], name: str, texts: Mapping[str, str], option: str) -> S:
    """A task with options, parsed as YAML values. UserError for an unknown option or invalid value."""
    check_options(name, texts, kind.model_fields, option)
    tree: dict[str, Any] = {key: parse(text, f"{option} {name}") for key, text in texts.items()}
    return validate_section(kind, tree, f"{option} {name}")


def check_options(name: str, texts: Mapping[str, str], known: Iterable[str], option: str) -> None:
    """UserError for an unknown option."""
    known = list(known)
    for key, text in texts.items():
        if key not in known:
            raise UserError(
                f"{option} {name}:{key}={text}: {name} has no option {key}; choose {nearest_first(key, known)}"
            )

"""Writes docs/configuration.md from the configuration's types and docstrings: `python -m launch.configuration_page`."""

import inspect
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from megakernel.config import PRESETS, Config
from megakernel.config.section import Section
from megakernel.config.validation import section_in

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

_OPENING = """\
# Configuration

Every key of a run's YAML file. `python -m launch.configuration_page` writes this page from the code; a test keeps it
current. `megakernel config CONFIG` checks a file and prints all its values; `megakernel config --schema` prints the
same as JSON schema, for an editor ([editor](editor_and_shell.md)).

A file may begin with `extends: FILE` or a list of files, relative to it, whose keys it overrides. On the command line
`section.key=value` changes a key. `${NAME}` and `${NAME:-default}` in a value are replaced from the environment.
Unknown keys are errors.
"""

_PLAIN = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    Path: "path",
    type(None): "null",
}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join([_OPENING, *_sections(), *_presets()])


def _sections() -> Iterator[str]:
    for name, field in Config.users_keys().items():
        section = section_in(field.annotation)
        if section is not None:
            yield from _tables(section, name, set())
        else:
            yield f"## {name}\n\n{_type(field)}, {_default(field)}: {_meaning(field)}\n"


def _tables(section: type[Section], name: str, written: set[type[Section]]) -> Iterator[str]:
    """The heading and table of a section, then of the sections inside it, each once."""
    written.add(section)
    yield f"{'#' * (2 + name.count('.'))} {name}\n\n{inspect.getdoc(section)}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for key, field in section.users_keys().items():
        yield f"| `{key}` | {_type(field)} | {_default(field)} | {_meaning(field)} |"
    yield ""
    for key, field in section.users_keys().items():
        inner = section_in(field.annotation)
        if inner is not None and inner not in written:
            yield from _tables(inner, f"{name}.{key}", written)


def _presets() -> Iterator[str]:
    yield "## Attention presets\n\nWhat the names of `model.attention` stand for.\n"
    for name, tree in PRESETS.items():
        yield f"* `{name}`: `{json.dumps(tree).replace(chr(34), '')}`"
    yield ""


def _meaning(field: FieldInfo) -> str:
    text = (field.description or "").replace("|", r"\|")
    return re.sub(r"(?<!`)\bnull\b(?!`)", "`null`", text)


def _type(field: FieldInfo) -> str:
    bounds = "".join(
        f" {sign} {getattr(item, name):g}"
        for item in field.metadata
        for name, sign in _BOUNDS.items()
        if hasattr(item, name)
    )
    plain, optional, _ = _type_name(field.annotation).partition(" or null")
    return plain + bounds + optional


def _type_name(annotation: Any) -> str:
    """The name of a type for somebody who writes YAML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(part) for part in arguments)
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(map(_type_name, arguments))}]"
    if origin is dict:
        return "mapping"
    return f"{{{', '.join(annotation.users_keys())}}}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        return "those below"
    return f"`{'null' if value is None else value if isinstance(value, Path) else json.dumps(value).strip(chr(34))}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

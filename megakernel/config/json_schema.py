"""JSON schema of configuration files, for editors: what a file may say, not what a run needs.

A file may leave out keys that another one gives, so sections require none. Short forms, `extends` and `${NAME}` are
allowed wherever the loader takes them. Conflicts between keys are found by the loader alone.
"""

from collections.abc import Iterator
from typing import Any

from .attention import PRESETS
from .section import Section, in_yaml_words, plain_types
from .tree import Config

_REF = "#/$defs/"
_INTEGER = r"[-+]?[0-9][0-9_]*"
_VARIABLE = r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^}]*)?\}"
_TEXTS = {
    # Editors read YAML 1.2's core schema, in which 20_000 is text.
    "integer": rf"^{_INTEGER}$",
    "number": rf"^({_INTEGER}(\.[0-9]*)?|[-+]?\.[0-9]+)([eE][-+]?[0-9]+)?$",
    "boolean": r"^(yes|no|on|off|true|false)$",
}
"""Type -> texts that the loader reads as a value of it."""


def json_schema(section: type[Section]) -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a YAML file that holds this section: `Config` or `Cluster`."""
    schema = section.model_json_schema()
    definitions: dict[str, Any] = schema.pop("$defs")
    # An element of a list, or one of several kinds, is written as a whole.
    whole = set(_elements([schema, definitions]))
    for name, definition in [("", schema), *definitions.items()]:
        if name not in whole:
            definition.pop("required", None)
        _relax(definition)
    for kind in _sections(section):
        properties = definitions[kind.__name__]["properties"]
        for key, place in kind.moved:
            owner: Any = kind.model_fields[place].annotation
            present = definitions[owner.__name__]["properties"]
            properties[key] = {**present[key], "deprecated": True}
    if section is Config:
        for value in schema["properties"].values():
            value["anyOf"].append({"type": "null"})  # `optimizer:` with nothing below it
        preset = _value({"enum": [*PRESETS], "description": "A preset, which the other keys change."})
        definitions["Attention"]["properties"]["preset"] = preset
    files: dict[str, Any] = {"type": ["string", "array"], "items": {"type": "string"}}
    files["description"] = "File or list of files, relative to this one, whose keys it overrides."
    schema["properties"]["extends"] = files
    definitions["Variable"] = {"type": "string", "pattern": _VARIABLE}
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Megakernel {section.__name__}",
    }
    return {**head, **schema, "$defs": definitions}


def _sections(section: type[Section]) -> Iterator[type[Section]]:
    for field in section.model_fields.values():
        for kind in plain_types(field.annotation):
            if issubclass(kind, Section):
                yield kind
                yield from _sections(kind)


def _elements(node: Any) -> Iterator[str]:
    """Names of the sections that are elements of lists or members of a union by kind."""
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for item in inner:
        yield from _elements(item)
    if isinstance(node, dict):
        listed = node.get("items", {})
        for option in [*node.get("oneOf", []), listed, *listed.get("anyOf", [])]:
            if "$ref" in option:
                yield option["$ref"].removeprefix(_REF)


def _relax(section: dict[str, Any]) -> None:
    """Allow in the values of one section, in place, what the loader takes beside their types."""
    section.pop("title", None)
    section["description"] = in_yaml_words(section.get("description", ""))
    section["properties"] = {key: _value(value) for key, value in section["properties"].items()}


def _value(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of one value with texts and variables allowed in its place, and in those inside of it."""
    notes: dict[str, Any] = {}
    if "description" in schema:
        notes["description"] = in_yaml_words(schema["description"])
    if "default" in schema and not isinstance(schema["default"], dict):  # a section's keys have their own
        notes["default"] = schema["default"]
    options = [*_options(schema)]
    if options == [{}] or {"type": "string"} in options:
        return {**notes, **({"anyOf": options} if len(options) > 1 else options[0])}
    types = dict.fromkeys(option["type"] for option in options if option.get("type") in _TEXTS)
    texts = [{"type": "string", "pattern": _TEXTS[kind]} for kind in types]
    return {**notes, "anyOf": [*options, *texts, {"$ref": f"{_REF}Variable"}]}


def _options(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The alternatives of a value, with the values inside of them relaxed."""
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        for alternative in alternatives:
            yield from _options(alternative)
        return
    left_out = ("description", "default", "title", "format", "discriminator")
    option = {key: item for key, item in schema.items() if key not in left_out}
    for key in ("items", "additionalProperties"):
        if isinstance(option.get(key), dict):
            option[key] = _value(option[key])
    if "prefixItems" in option:
        option["prefixItems"] = [_value(item) for item in option["prefixItems"]]
    yield option

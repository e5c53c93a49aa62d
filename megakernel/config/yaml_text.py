"""YAML with the scalars of YAML 1.2: `1e-3` is a number, `no` is text, and a repeated key is an error.

PyYAML follows YAML 1.1, where `1e-3` is a string, `12:30` is 750, `010` is 8 and `no` is false. Reading and
writing both use YAML 1.2's core schema, so that values survive a round trip.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from .errors import MISSING, ConfigError, Problem

_DIGITS = "0123456789"
_SCALARS: list[tuple[str, str, str]] = [
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+" + _DIGITS),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9_]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+." + _DIGITS,
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
]


class _Loader(yaml.SafeLoader):
    def __init__(self, stream: str):
        super().__init__(stream)
        self.repeated: list[tuple[str, int, int]] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_line: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in first_line:
                self.repeated.append((name, first_line[name], line))
            first_line.setdefault(name, line)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if any("\ud800" <= character <= "\udfff" for character in str(node.value)):
            reason = "half a surrogate pair is not a character"
            raise yaml.constructor.ConstructorError(problem=reason, problem_mark=node.start_mark)
        return super().construct_scalar(node)


_MAX_VALUES = 100_000
_MAX_LEVELS = 100
"""Most values (aliases expanded) and levels of a document, against input that would take forever."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # equal values are written out each time, not as anchors


for _yaml_class in (_Loader, _Dumper):
    _yaml_class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in _SCALARS:
        _starts = [*_first, ""] if _tag.endswith("null") else list(_first)
        _yaml_class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _starts)


def parse(text: str, source: str) -> Any:
    """The value of one YAML document; ConfigError names `source` and the line of an error."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        value = None
        if node is not None:
            _extent(node, {})
            value = loader.construct_document(node)
    except RecursionError:
        raise ConfigError([Problem(source, MISSING, "is nested too deeply", "write it flatter")]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        reason = f"is not YAML ({error.problem or error.context})"
        raise ConfigError([Problem(where, MISSING, reason, "correct the line")]) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: int() refuses thousands of digits
        raise ConfigError(
            [Problem(source, MISSING, f"is not YAML ({' '.join(str(error).split())})", "correct it")]
        ) from None
    except (LookupError, AttributeError, TypeError):  # of values that are not what their tags say
        raise ConfigError(
            [Problem(source, MISSING, "is not YAML (a tag does not fit its value)", "remove it")]
        ) from None
    if loader.repeated:
        raise ConfigError(
            [
                Problem(
                    f"{source}:{line}", MISSING, f"repeats key {name!r} of line {first}", "keep one of them"
                )
                for name, first, line in loader.repeated
            ]
        )
    return value


def _extent(node: yaml.Node, known: dict[yaml.Node, tuple[int, int] | None]) -> tuple[int, int]:
    """(values, levels) of a node with aliases expanded; YAMLError if they exceed the limits."""
    if node not in known:
        known[node] = None
        inner = [] if isinstance(node, yaml.ScalarNode) else node.value
        nodes = [part for item in inner for part in (item if isinstance(item, tuple) else (item,))]
        extents = [_extent(part, known) for part in nodes]
        values = 1 + sum(values for values, _ in extents)
        levels = 1 + max((levels for _, levels in extents), default=0)
        if values > _MAX_VALUES or levels > _MAX_LEVELS:
            what = f"{values:,} values" if values > _MAX_VALUES else f"{levels} levels"
            raise yaml.MarkedYAMLError(problem=f"{what}, aliases written out", problem_mark=node.start_mark)
        known[node] = values, levels
    extent = known[node]
    if extent is None:
        raise yaml.MarkedYAMLError(problem="an anchor that contains itself", problem_mark=node.start_mark)
    return extent


MAX_BYTES = 1 << 20
"""Largest configuration file in bytes."""


def read_text(path: Path) -> str:
    """The text of one file; ConfigError unless it is a regular file of at most MAX_BYTES of UTF-8."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            reason = "is not a regular file"
        elif path.stat().st_size > MAX_BYTES:
            reason = f"has more than {MAX_BYTES:,} bytes"
        else:
            return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        reason = "is not UTF-8 text"
    raise ConfigError([Problem(str(path), MISSING, reason, "name a YAML file")])


def read(path: Path) -> dict[str, Any]:
    """The mapping in one file."""
    text = read_text(path)
    value = parse(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            [Problem(str(path), MISSING, "holds no sections", "write `section:` and its keys below")]
        )
    return value


def write(value: Any, compact: bool = False) -> str:
    """Block-style YAML in the order of `value`; `parse` returns an equal value.

    compact: mappings and lists without nested ones are written on one line.
    """
    style = None if compact else False
    return yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, default_flow_style=style, width=110, allow_unicode=True
    )

"""Reading a configuration: files laid over each other, then overrides, then the environment, then validation."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import yaml_text
from .attention import DEFAULT_PRESET, expand_preset
from .errors import MISSING, ConfigError, Problem
from .section import merged
from .tree import Config
from .validation import validate

_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


def read_composed(path: Path, readers: tuple[Path, ...] = ()) -> dict[str, Any]:
    """One file laid over the files its `extends` names, later ones over earlier ones.

    readers: the files that it is read for.
    """
    resolved = path.resolve()
    if resolved in readers:
        circle = " -> ".join(reader.name for reader in (*readers[readers.index(resolved) :], resolved))
        raise ConfigError([Problem(f"{path}: extends", MISSING, f"goes in a circle ({circle})", "break it")])
    tree = yaml_text.read(path)
    extends = tree.pop("extends", [])
    bases = [extends] if isinstance(extends, str) else extends
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        remedy = "write one file or a list of files, relative to this one"
        raise ConfigError([Problem(f"{path}: extends", extends, "names no files", remedy)])
    out: dict[str, Any] = {}
    for base in bases:
        out = lay_over(out, read_composed(path.parent / base, (*readers, resolved)))
    return lay_over(out, tree)


def lay_over(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `base`, key by key, except where half of one and half of another is neither.

    An attention that names its preset or similarity is a new mechanism and replaces the one below; other keys
    of it change the one below, a preset expanded first. Corpora replace those below.
    """
    out = merged(base, changes)
    attention = _at(changes, "model", "attention")
    if isinstance(attention, dict):
        is_new = "preset" in attention or "similarity" in attention
        below = None if is_new else expand_preset(_at(base, "model", "attention"))
        out["model"]["attention"] = merged(below, attention) if isinstance(below, dict) else attention
    for key in ("train", "validation"):
        corpora = _at(changes, "data", key)
        if corpora is not None:
            out["data"][key] = corpora
    return out


def _at(tree: Mapping[str, Any], section: str, key: str) -> Any:
    keys = tree.get(section)
    return keys.get(key) if isinstance(keys, dict) else None


_LONGEST_KEY = 20


def override(tree: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """The tree with `section.key=value` laid over it, in order; values are YAML."""
    out, problems = dict(tree), []
    if isinstance(
        out.get("model"), dict
    ):  # so that model.attention.near.blocks=2 changes the default preset too
        out["model"] = {"attention": DEFAULT_PRESET, **out["model"]}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        parts = key.split(".")
        if not equals or not all(parts) or len(parts) > _LONGEST_KEY:
            problems.append(Problem("", assignment, "is no override", "write section.key=value"))
            continue
        try:
            value = yaml_text.parse(text, key)
            for part in reversed(parts):
                value = {part: value}
            out = lay_over(out, value)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return out


def interpolate(tree: Any, env: Mapping[str, str] = os.environ) -> tuple[Any, list[Problem]]:
    """The tree with `${NAME}` and `${NAME:-default}` replaced, and a problem for every name that is not set.

    A value that is nothing but one variable is read as YAML, so that a number stays a number.
    """
    problems: list[Problem] = []
    return _interpolated(tree, "", env, problems), problems


def _interpolated(value: Any, key: str, env: Mapping[str, str], problems: list[Problem]) -> Any:
    if isinstance(value, dict):
        return {
            name: _interpolated(item, f"{key}.{name}".lstrip("."), env, problems)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_interpolated(item, f"{key}.{index}", env, problems) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def text_of(match: re.Match[str]) -> str:
        text = env.get(match["name"], match["default"])
        if text is None:
            remedy = f"export {match['name']} or write ${{{match['name']}:-default}}"
            problems.append(Problem(key, value, f"needs {match['name']}, which is not set", remedy))
            return match[0]
        return text

    text = _VARIABLE.sub(text_of, value)
    return yaml_text.parse(text, key) if _VARIABLE.fullmatch(value) and text != value else text


def load(path: str | Path, overrides: Iterable[str] = (), env: Mapping[str, str] = os.environ) -> Config:
    """The configuration of one YAML file.

    `extends: FILE` or a list of files, relative to the file, is laid under it. overrides are
    `section.key=value` with YAML values. `${NAME}` and `${NAME:-default}` in values come from `env`.
    Raises ConfigError with every problem.
    """
    tree = override(read_composed(Path(path)), overrides)
    plain, unset = interpolate(tree, env)
    return validate(plain, unset)


def from_yaml(text: str, source: str = "configuration") -> Config:
    """The configuration in a text that `to_yaml` wrote; `source` names it in errors."""
    return validate(yaml_text.parse(text, source) or {})


def to_yaml(config: Config) -> str:
    """Every key with its value, presets written out; `from_yaml` gives an equal configuration."""
    return yaml_text.write(config.model_dump(mode="json"))

"""Loads a configuration: merges files, then overrides, then environment variables, and validates the result."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import yaml_text
from .attention import DEFAULT_PRESET, expand_preset
from .epochs import with_steps
from .errors import MISSING, ConfigError, Problem
from .section import merged
from .tree import Config
from .validation import validate

_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


def read_composed(path: Path, parents: tuple[Path, ...] = ()) -> dict[str, Any]:
    """One file merged over the files that its `extends` lists, later ones over earlier ones.

    parents: the chain of files that extend it, to find cycles.
    """
    resolved = path.resolve()
    if resolved in parents:
        cycle = " -> ".join(parent.name for parent in (*parents[parents.index(resolved) :], resolved))
        raise ConfigError([Problem(f"{path}: extends", MISSING, f"goes in a circle ({cycle})", "break it")])
    tree = yaml_text.read(path)
    extends = tree.pop("extends", [])
    bases = [extends] if isinstance(extends, str) else extends
    if not isinstance(bases, list) or not all(isinstance(base, str) and "\0" not in base for base in bases):
        remedy = "write one file or a list of files, relative to this one"
        raise ConfigError([Problem(f"{path}: extends", bases, "names no files", remedy)])
    out: dict[str, Any] = {}
    for base in bases:
        try:
            yaml_text.read_text(path.parent / base)
        except ConfigError as error:
            reason = f"of {path} {error.problems[0].reason}"
            remedy = "name a YAML file, relative to that one"
            raise ConfigError([Problem("extends", base, reason, remedy)]) from None
        out = merge_config(out, read_composed(path.parent / base, (*parents, resolved)))
    return merge_config(out, tree)


def merge_config(
    base: Mapping[str, Any],
    changes: Mapping[str, Any],
    replaced_by: tuple[str, ...] = ("preset", "mechanism", "similarity"),
) -> dict[str, Any]:
    """`changes` merged over `base` key by key, except for attention and corpora.

    An attention that sets a key of `replaced_by` replaces the one of `base`; other keys change that one, after its
    preset is expanded. Lists of corpora replace those of `base`.
    """
    out = merged(base, changes)
    attention = _at(changes, "model", "attention")
    if isinstance(attention, dict):
        is_new = any(key in attention for key in replaced_by)
        old = None if is_new else expand_preset(_at(base, "model", "attention"))
        out["model"]["attention"] = merged(old, attention) if isinstance(old, dict) else attention
    for key in ("train", "validation"):
        if (corpora := _at(changes, "data", key)) is not None:
            out["data"][key] = corpora
    return out


def _at(tree: Mapping[str, Any], section: str, key: str) -> Any:
    keys = tree.get(section)
    return keys.get(key) if isinstance(keys, dict) else None


_MAX_KEY_PARTS = 20
"""More parts than any key has."""


def override(tree: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """The tree after the `section.key=value` assignments, in order; values are YAML."""
    out, problems = dict(tree), []
    if isinstance(out.get("model"), dict):
        # So that model.attention.near.blocks=2 changes the default preset, too.
        out["model"] = {"attention": DEFAULT_PRESET, **out["model"]}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        parts = key.split(".")
        if not equals or not all(parts) or len(parts) > _MAX_KEY_PARTS:
            problems.append(Problem("", assignment, "is not an override", "write section.key=value"))
            continue
        if key.startswith("-"):
            problems.append(
                Problem("", assignment, "begins with a dash, and no key does", "leave out the dashes")
            )
            continue
        try:
            value = yaml_text.parse(text, key)
            for part in reversed(parts):
                value = {part: value}
            one_key = key.startswith("model.attention.")
            out = merge_config(out, value, ("preset",)) if one_key else merge_config(out, value)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return out


def interpolate(tree: Any, env: Mapping[str, str] = os.environ) -> tuple[Any, list[Problem]]:
    """The tree with `${NAME}` and `${NAME:-default}` replaced, and a problem for every variable that is not set.

    A value that is exactly one variable is parsed as YAML, so that a number stays a number.
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

    def replacement(match: re.Match[str]) -> str:
        text = env.get(match["name"], match["default"])
        if text is None:
            remedy = f"export {match['name']} or write ${{{match['name']}:-default}}"
            problems.append(Problem(key, value, f"needs {match['name']}, which is not set", remedy))
            return match[0]
        return text

    text = _VARIABLE.sub(replacement, value)
    return yaml_text.parse(text, key) if _VARIABLE.fullmatch(value) and text != value else text


def load(path: str | Path, overrides: Iterable[str] = (), env: Mapping[str, str] = os.environ) -> Config:
    """The configuration of one YAML file.

    The file is merged over those of `extends: FILE` or a list, relative to it. overrides: `section.key=value` with
    YAML values. training.epochs becomes steps. `${NAME}` and `${NAME:-default}` in values are read from `env`.
    ConfigError lists every problem.
    """
    tree = override(read_composed(Path(path)), overrides)
    plain, unset = interpolate(tree, env)
    plain, problems = with_steps(plain)
    return validate(plain, [*unset, *problems])


def from_yaml(text: str, source: str = "configuration") -> Config:
    """The configuration in a text written by `to_yaml`; `source` names it in errors."""
    tree = yaml_text.parse(text, source)
    if not isinstance(tree, dict):
        raise ConfigError([Problem(source, MISSING, "holds no sections", "restore it")])
    _set_earlier_orders(tree.get("data"))
    try:
        return validate(tree)
    except ConfigError as error:
        raise ConfigError(
            [replace(problem, key=f"{source}: {problem.key}") for problem in error.problems]
        ) from None


def _set_earlier_orders(data: Any) -> None:
    """Set the order of text of a data section that `to_yaml`, which writes every key, wrote before it knew another."""
    if not isinstance(data, dict) or "validation" not in data:
        return
    corpora = data.get("train")
    if isinstance(corpora, list) and all(isinstance(one, dict) and "weight" in one for one in corpora):
        data.setdefault("blend", "periodic")
        data.setdefault("unread_first", False)


def to_yaml(config: Config) -> str:
    """Every key with its value, presets expanded; `from_yaml` returns an equal configuration."""
    return yaml_text.write(config.model_dump(mode="json"))

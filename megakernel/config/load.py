"""Reading a configuration: file, then overrides, then environment, then validation."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from . import yaml_text
from .composition import interpolate, override, read_composed
from .tree import Config
from .validation import validate


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

"""`megakernel config`: the resolved configuration, and what every key means."""

import argparse
import sys
from collections.abc import Iterator

from launch.arguments import add_config_arguments
from launch.messages import console
from megakernel.config import Config, UserError, load, to_yaml
from megakernel.config.errors import nearest_first
from megakernel.config.section import Section

HELP = "print the configuration of a run, every key with its value"
EXAMPLE = "megakernel config configs/demo.yaml model.attention=softmax"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_config_arguments(parser)
    parser.add_argument("--explain", metavar="KEY", help="explain a key or a section, such as schedule")


def run(args: argparse.Namespace) -> int:
    """Check the configuration and print it as YAML that loads to an equal one, or explain its keys."""
    config = load(args.config, args.overrides)
    if args.explain is not None:
        print("\n".join(_explanation(config, args.explain)))
        return 0
    text = to_yaml(config)
    if sys.stdout.isatty():
        from rich.syntax import Syntax

        console().print(Syntax(text, "yaml", background_color="default"))
    else:
        print(text, end="")
    return 0


def _explanation(config: Config, key: str) -> list[str]:
    lines = [
        line
        for name, value, meaning in _keys(config, "")
        if name == key or name.startswith(f"{key}.")
        for line in (f"{name}: {value}", f"    {meaning}")
    ]
    if not lines:
        raise UserError(
            f"--explain {key} is no key of this configuration; did you mean {_nearest(config, key)}?"
        )
    return lines


def _nearest(config: Config, key: str) -> str:
    """The keys and sections that end in `key`, such as model.attention for attention, else the most similar ones."""
    names = [name for name, _, _ in _keys(config, "")]
    sections = dict.fromkeys(name[:dot] for name in names for dot in range(len(name)) if name[dot] == ".")
    known = [*sections, *names]
    return nearest_first(key, [name for name in known if name.endswith(f".{key}")] or known, most=3)


def _keys(section: Section, prefix: str) -> Iterator[tuple[str, object, str]]:
    """Name, value and description of every key in a section and the sections inside it."""
    for name, field in type(section).users_keys().items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value, field.description or ""

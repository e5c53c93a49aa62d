"""`megakernel config`: the resolved configuration, what every key means, and where two configurations differ."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from launch import shipped
from launch.arguments import NotFound, add_config_arguments, run_folder
from launch.messages import console
from megakernel.config import Config, UserError, differences, from_yaml, load, to_yaml
from megakernel.config.cluster import Cluster
from megakernel.config.errors import nearest_first
from megakernel.config.json_schema import json_schema
from megakernel.config.section import Section
from megakernel.config.yaml_text import read_text

HELP = "print the configuration of a run, every key with its value"
EXAMPLE = "megakernel config configs/demo.yaml model.attention=softmax"

_SCHEMAS: dict[str, type[Section]] = {"run": Config, "cluster": Cluster}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_config_arguments(parser, optional=True)
    parser.add_argument("--explain", metavar="KEY", help="explain a key or a section, such as schedule")
    parser.add_argument(
        "--diff",
        nargs=2,
        metavar=("A", "B"),
        help="print the keys that differ between two configurations, defaults filled in: YAML files or runs",
    )
    parser.add_argument(
        "--schema",
        nargs="?",
        const="run",
        choices=_SCHEMAS,
        help="print the JSON schema of such files, or of `cluster` files, for an editor",
    )


def run(args: argparse.Namespace) -> int:
    """Check the configuration and print it as YAML that loads to an equal one, explain its keys, or compare two."""
    _check_one_purpose(args)
    if args.schema is not None:
        print(json.dumps(json_schema(_SCHEMAS[args.schema]), indent=1))
        return 0
    if args.diff is not None:
        print("\n".join(_differences(*args.diff)))
        return 0
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


def _check_one_purpose(args: argparse.Namespace) -> None:
    """Raise UserError for options that exclude each other, or if there is nothing to print."""
    chosen = [f"--{name}" for name in ("schema", "diff", "explain") if getattr(args, name) is not None]
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(chosen)} exclude each other; give one of them")
    if args.config is None and chosen in ([], ["--explain"]):
        raise UserError("CONFIG is missing; give one, --schema or --diff A B; see megakernel config --help")
    if args.config is not None and chosen in (["--schema"], ["--diff"]):
        what = "two files or runs" if args.diff else "no file"
        raise UserError(
            f"{' '.join([args.config, *args.overrides])} has no effect: {chosen[0]} takes {what}; remove it"
        )


def _differences(first: str, second: str) -> list[str]:
    """A line per key on which two configurations differ, in the order of the sections."""
    found = differences(_named(first), _named(second))
    lines = [f"{item.key}: {json.dumps(item.recorded)} -> {json.dumps(item.wanted)}" for item in found]
    return lines or [f"{first} and {second} have the same value for every key"]


def _named(text: str) -> Config:
    """The configuration of a YAML file, or the recorded one of a run."""
    if Path(text).suffix in (".yaml", ".yml") or Path(text).is_file():
        return load(shipped.config_file(text))
    file = run_folder(text) / "config.yaml"
    if not file.is_file():
        raise NotFound(f"--diff {text} is no YAML file and no run: {file} is missing; name one of them")
    return from_yaml(read_text(file), str(file))


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

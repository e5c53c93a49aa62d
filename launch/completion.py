"""`megakernel --print-completion SHELL`: a script that completes commands, options, files, runs and keys."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from launch.arguments import RUNS
from megakernel.config import Config, extras
from megakernel.config.section import Section
from megakernel.config.validation import section_in

SHELLS = ("bash", "zsh")

_FUNCTIONS = {
    "bash": """
_megakernel_keys() {
  compgen -W "KEYS" -- "$1"
}
_megakernel_run_dirs() {
  compgen -d -- "$1"
  (cd RUNS 2>/dev/null && compgen -d -- "$1")
}
""",
    "zsh": """
_megakernel_keys() {
  compadd -S '' -- KEYS
}
_megakernel_run_dirs() {
  local -a names
  names=(RUNS/*(N/:t))
  compadd -a names
  _files -/
}
""",
}

# A key that ends in `=` is followed by its value and not by a space; shtab's function cannot say so.
_ENDINGS = {
    "bash": """
_megakernel() {
  _shtab_megakernel "$@"
  if [[ ${#COMPREPLY[@]} = 1 && "${COMPREPLY[0]}" == *= ]]; then compopt -o nospace; fi
}
complete -o bashdefault -F _megakernel megakernel
""",
    "zsh": "",
}


class PrintCompletion(argparse.Action):
    """The option's action: prints the script of the chosen shell, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Raises UserError if shtab is not installed."""
        print(script(parser, str(values)))
        parser.exit()


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion script of a program for one of SHELLS; its parser is changed. UserError if shtab is missing."""
    extras.need("--print-completion", "shtab")
    import shtab

    _mark(parser, shtab.FILE, shtab.DIRECTORY)
    keys = " ".join(f"{key}=" for key in _keys(Config))
    functions = _FUNCTIONS[shell].replace("KEYS", keys).replace("RUNS", str(RUNS))
    return str(shtab.complete(parser, shell, preamble=functions)) + _ENDINGS[shell]


def _mark(
    parser: argparse.ArgumentParser, files: Mapping[str, object], folders: Mapping[str, object]
) -> None:
    """Say what completes every argument of a parser and its subparsers, in the attributes that shtab reads."""
    for action in parser._actions:
        place = str(action.metavar)
        if isinstance(action, argparse._SubParsersAction):
            # What the parser's help lists by group, shtab looks for here; without names that are a subcommand's too.
            inner_names = {name for inner in action.choices.values() for name in _subcommands(inner)}
            action._choices_actions = [
                action._ChoicesPseudoAction(name, [], inner.description)
                for name, inner in action.choices.items()
                if name not in inner_names
            ]
            for inner in action.choices.values():
                _mark(inner, files, folders)
        elif place == "RUN":
            _complete(action, dict.fromkeys(SHELLS, "_megakernel_run_dirs"))
        elif place == "section.key=value":
            _complete(action, dict.fromkeys(SHELLS, "_megakernel_keys"))
        elif "DIR" in place:
            _complete(action, folders)
        elif action.type is Path or "FILE" in place or place in ("CONFIG", "SOURCE", "('A', 'B')"):
            _complete(action, files)


def _subcommands(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices


def _complete(action: argparse.Action, how: Mapping[str, object]) -> None:
    vars(action)["complete"] = how


def _keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Every dotted key that an override can name: none of the elements of a list."""
    for name, field in section.users_keys().items():
        yield prefix + name
        inner = section_in(field.annotation)
        if inner is not None and not _has_list(field.annotation):
            yield from _keys(inner, f"{prefix}{name}.")


def _has_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(map(_has_list, get_args(annotation)))

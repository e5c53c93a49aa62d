"""The arguments that commands share: CONFIG and its overrides, RUN and its folder, and numbers in their range."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megakernel.config import UserError
from megakernel.config.section import check_magnitude


def add_config_arguments(
    parser: argparse.ArgumentParser,
    config: str = "YAML file, such as configs/demo.yaml",
    overrides: str = "keys to change, values as YAML: training.steps=100 model.attention=softmax",
) -> None:
    """Declare CONFIG and its overrides, with these helps."""
    parser.add_argument("config", metavar="CONFIG", help=config)
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # else argparse names it among what is required
        metavar="section.key=value",
        help=overrides,
    )


class NotFound(UserError):
    """There is no such run, job or log."""


RUNS = Path("runs")
"""Where the folders of runs are unless a command is told."""


def folders_of(text: str, root: Path = RUNS) -> tuple[Path, Path]:
    """Where a run may lie that was named on a command line: that folder, or the one of that name under `root`."""
    return Path(text), root / text


def _trained_run(text: str) -> Path:
    plain, named = folders_of(text)
    if (plain / "config.yaml").is_file() or (plain.exists() and not (named / "config.yaml").is_file()):
        return plain
    return plain if len(plain.parts) > 1 and not named.exists() else named


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare RUN, which may be a folder in the Hugging Face form, and which of its checkpoints."""
    add_run_arguments(parser, " (or a folder with config.json and model.safetensors)")


def add_run_arguments(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Declare RUN and which of its checkpoints. more: behind its help."""
    parser.add_argument(
        "run_folder", type=_trained_run, metavar="RUN", help=f"a run: its folder, or its name in {RUNS}{more}"
    )
    parser.add_argument(
        "--step", type=int, metavar="S", help="checkpoint of this step (default: the newest good one)"
    )


def add_job_run_arguments(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """Declare the RUNs of commands that look after submitted runs, and where their folders are."""
    text = (
        "submitted runs: folders, names under --root, ids of jobs, patterns such as 'lr-*'; the name of an array or a "
        "sweep is all its members"
    )
    parser.add_argument("runs", metavar="RUN", nargs="*" if optional else "+", default=[], help=text)
    add_root_argument(parser)


def add_root_argument(parser: argparse.ArgumentParser) -> None:
    """Declare where the folders of runs are."""
    parser.add_argument(
        "--root",
        type=Path,
        default=RUNS,
        metavar="DIR",
        help="folder of all runs (default %(default)s)",
    )


@dataclass(frozen=True)
class Number:
    """The type of an option: a number from `least` to `most`."""

    kind: type[int] | type[float]
    least: float = -float("inf")
    most: float = float("inf")

    def __call__(self, text: str) -> int | float:
        """The number in a text; ArgumentTypeError, with the remedy, where there is none in it or not one in range."""
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        try:
            value = self.kind(text)
            check_magnitude(value)
        except ValueError as error:
            reason = str(error) if str(error).startswith("is ") else f"is not {_NAMES[self.kind]}"
            raise argparse.ArgumentTypeError(f"{shown} {reason}; give {self}") from None
        if not self.least <= value <= self.most or abs(value) == float("inf"):
            raise argparse.ArgumentTypeError(f"{shown} cannot be; give {self}")
        return value

    def __str__(self) -> str:
        bounds = {"of at least": self.least, "of at most": self.most}
        given = [f"{words} {bound:,}" for words, bound in bounds.items() if abs(bound) < float("inf")]
        return f"{_NAMES[self.kind]} {' and '.join(given)}".strip()


_NAMES = {int: "an integer", float: "a finite number"}


class NumberParser(argparse.ArgumentParser):
    """Reads `type=int` and `type=float` as `Number` does, so that no option of a command takes nan for one."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for kind in (int, float):
            self.register("type", kind, Number(kind))

"""Arguments that commands share: CONFIG and overrides, RUN and its folder, and range-checked numbers."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import shipped
from megakernel.config import UserError
from megakernel.config.section import check_magnitude


def add_config_arguments(
    parser: argparse.ArgumentParser,
    config: str = "YAML file, such as configs/demo.yaml",
    overrides: str = "keys to change, values as YAML: training.steps=100 model.attention=softmax",
    optional: bool = False,
) -> None:
    """Declare CONFIG and its overrides; `config` and `overrides` are their help texts."""
    count = "?" if optional else None
    parser.add_argument("config", nargs=count, type=shipped.config_file, metavar="CONFIG", help=config)
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # without it argparse lists the overrides as required
        metavar="section.key=value",
        help=overrides,
    )


def add_allow_change(parser: argparse.ArgumentParser) -> None:
    """Declare --allow-change, the keys of a run that may change at this start."""
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="key of a run that may change from its newest checkpoint on, such as optimizer.lr, or schedule for all of "
        "its keys; repeatable",
    )


def allow_change_options(allowed: Sequence[str]) -> list[str]:
    """The words of a command line that allow these changes."""
    return [word for key in allowed for word in ("--allow-change", key)]


class NotFound(UserError):
    """A run, job or log that does not exist."""


RUNS = Path("runs")
"""Default folder of all runs."""


def candidate_folders(text: str, root: Path = RUNS) -> tuple[Path, Path]:
    """The two folders that a run's name on a command line can mean: that path, and that name under `root`."""
    return Path(text), root / text


def run_folder(text: str) -> Path:
    """The folder of a run that a command line names by its folder, or by its name in RUNS."""
    plain, named = candidate_folders(text)
    if (plain / "config.yaml").is_file() or (plain.exists() and not (named / "config.yaml").is_file()):
        return plain
    return plain if len(plain.parts) > 1 and not named.exists() else named


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare RUN, which may also be a Hugging Face model folder, and --step."""
    add_run_arguments(parser, " (or a folder with config.json and model.safetensors)")


def add_run_arguments(parser: argparse.ArgumentParser, help_suffix: str = "") -> None:
    """Declare RUN and --step. help_suffix: text appended to RUN's help."""
    parser.add_argument(
        "run_folder",
        type=run_folder,
        metavar="RUN",
        help=f"a run: its folder, or its name in {RUNS}{help_suffix}",
    )
    parser.add_argument(
        "--step", type=int, metavar="S", help="step of the checkpoint to use (default: the newest intact one)"
    )


def add_job_run_arguments(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """Declare the RUNs of a command for submitted runs, and --root."""
    text = (
        "submitted runs: folders, names under --root, job ids, or patterns such as 'lr-*'; the name of an array or a "
        "sweep means all its members"
    )
    parser.add_argument("runs", metavar="RUN", nargs="*" if optional else "+", default=[], help=text)
    add_root_argument(parser)


def add_root_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --root, the folder of all runs."""
    parser.add_argument(
        "--root", type=Path, default=RUNS, metavar="DIR", help="folder of all runs (default %(default)s)"
    )


@dataclass(frozen=True)
class Number:
    """An argparse type: a number from `minimum` to `maximum`."""

    kind: type[int] | type[float]
    minimum: float = -float("inf")
    maximum: float = float("inf")

    def __call__(self, text: str) -> int | float:
        """Parse a number. Raises ArgumentTypeError with the remedy if it is malformed or out of range."""
        short_text = text if len(text) <= 40 else f"{text[:37]}..."
        try:
            value = self.kind(text)
            check_magnitude(value)
        except ValueError as error:
            reason = str(error) if str(error).startswith("is ") else f"is not {_KIND_NAMES[self.kind]}"
            raise argparse.ArgumentTypeError(f"{short_text} {reason}; give {self}") from None
        if not self.minimum <= value <= self.maximum or abs(value) == float("inf"):
            raise argparse.ArgumentTypeError(f"{short_text} is out of range; give {self}")
        return value

    def __str__(self) -> str:
        bounds = {"of at least": self.minimum, "of at most": self.maximum}
        limits = [f"{words} {bound:,}" for words, bound in bounds.items() if abs(bound) < float("inf")]
        return f"{_KIND_NAMES[self.kind]} {' and '.join(limits)}".strip()


_KIND_NAMES = {int: "an integer", float: "a finite number"}


class NumberParser(argparse.ArgumentParser):
    """A parser whose `type=int` and `type=float` mean `Number`, so that no option accepts nan."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for kind in (int, float):
            self.register("type", kind, Number(kind))

"""The numbers that options take: finite, and in a range."""

import argparse
from dataclasses import dataclass
from typing import Any

from megakernel.config.section import check_magnitude


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

"""One line per logged step on the console; colored on a terminal, plain in a log file."""

import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TextIO

from rich.console import Console as RichConsole
from rich.text import Text


def decimal(value: float, digits: int = 4, sign: str = "") -> str:
    """A number with this many decimals; what rounds to 0 has no sign. sign: `+` also marks positive numbers."""
    text = f"{value:{sign}.{digits}f}"
    return text.lstrip("+-") if float(text) == 0 else text


EVAL_OF_SOURCE = "eval/loss/"
"""Tag of a validation corpus's loss, before its name."""

_BAR = 30
"""Columns."""

_DROPPABLE = ("lr ", "norm ", "MFU ")
"""Beginnings of the parts that a step's line leaves out, in this order, if it is longer than the console is wide."""


class Console:
    """Prints the progress of a run; only rank 0 calls it."""

    def __init__(self, total_steps: int, total_tokens: int, file: TextIO | None = None):
        """total_tokens: tokens of the whole run; the ETA is computed from tokens because steps may grow."""
        self._total_steps = total_steps
        self._total_tokens = total_tokens
        self._out = RichConsole(file=file or sys.stdout, highlight=False, soft_wrap=True)
        self._is_live = self._out.is_terminal and not self._out.is_dumb_terminal

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """Print a logged step from its metrics, in a line as wide as the console, 80 columns in a file."""
        parts = [
            (f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}", "bold"),
            (f"loss {decimal(scalars['train/loss'])}" if "train/loss" in scalars else "no loss", "bold cyan"),
            *_accuracy("train", scalars, "cyan"),
            (f"lr {scalars['train/lr']:.2e}", ""),
            (f"norm {scalars['train/grad_norm']:.3f}", ""),
            (f"{_speed(scalars['throughput/tokens_per_sec'])} tok/s", "green"),
        ]
        if "throughput/mfu" in scalars:
            parts.append((f"MFU {scalars['throughput/mfu']:.1%}", "green"))
        left = (self._total_tokens - scalars["train/tokens"]) / scalars["throughput/tokens_per_sec"]
        parts.append((f"ETA {_duration(left)}", ""))
        if skipped := int(scalars["train/skipped_steps"]):
            parts.append((f"{skipped} skipped", "bold red"))
        for beginning in _DROPPABLE:
            if sum(len(text) + 2 for text, _ in parts) - 2 > self._out.width:
                parts = [(text, style) for text, style in parts if not text.startswith(beginning)]
        self._print(parts)

    def evaluation(self, step: int, scalars: Mapping[str, float]) -> None:
        """Print an evaluation from its metrics."""
        parts = [(f"eval at step {step}", "bold"), (f"loss {decimal(scalars['eval/loss'])}", "bold magenta")]
        if (bits := scalars.get("eval/bits_per_byte")) is not None:
            parts.append((f"{decimal(bits)} bits/byte", "magenta"))
        self._print([*parts, *_accuracy("eval", scalars, "magenta")])
        for tag, loss in scalars.items():
            if tag.startswith(EVAL_OF_SOURCE):
                self._print([(f"    {tag.removeprefix(EVAL_OF_SOURCE)}: loss {decimal(loss)}", "magenta")])

    def progress(self, step: int) -> None:
        """On a terminal, show a progress bar that the next line overwrites."""
        if self._is_live:
            done = _BAR * step // self._total_steps
            place = f"step {step}/{self._total_steps}"
            self._print([(place, "bold"), ("━" * done + "╌" * (_BAR - done), "cyan")], end="\r")

    def note(self, text: str) -> None:
        """Print any other message."""
        self._print([(text, "yellow")])

    def _print(self, parts: list[tuple[str, str]], end: str = "\n") -> None:
        if self._is_live:
            self._out.file.write("\x1b[K")  # clear the rest of a longer line
        self._out.print(Text("  ").join(Text(text, style) for text, style in parts), end=end)
        self._out.file.flush()


def _speed(tokens_per_sec: float) -> str:
    return f"{tokens_per_sec / 1e6:.2f}M" if tokens_per_sec >= 1e6 else f"{tokens_per_sec:,.0f}"


def _duration(seconds: float) -> str:
    """H:MM:SS, from a day on days and hours."""
    left = timedelta(seconds=round(seconds))
    return f"{left.days}d {left.seconds // 3600}h" if left.days else str(left)


def _accuracy(tag: str, scalars: Mapping[str, float], style: str) -> Iterator[tuple[str, str]]:
    if (accuracy := scalars.get(f"{tag}/accuracy")) is not None:
        yield f"accuracy {accuracy:.1%}", style

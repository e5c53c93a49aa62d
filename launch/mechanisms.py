"""`megakernel mechanisms`: every attention preset, where it comes from and what it costs."""

import argparse
from pathlib import Path

HELP = "list the attention mechanisms: source, cost, state, parameters, what they can do"
EXAMPLE = "megakernel mechanisms --markdown"

PAGE = Path(__file__).parents[1] / "docs" / "mechanisms.md"

_INTRODUCTION = """# Mechanisms

Every preset of `model.attention`, read off the code: `megakernel mechanisms --markdown > docs/mechanisms.md` writes
this page, and a test holds it current. A preset is a name for a point of the algebra; any key can be changed beside it:

```yaml
model:
  attention: {preset: flurka, compression: {rank: 16}}
```

Sizes are those of one layer with 4 heads of width 32 on rows of 512 tokens. *Cost* is how the operations of a row grow
with its length. *State* counts the numbers that decoding carries from token to token; without one, decoding keeps keys
or is not possible. *Added* counts learned numbers beside the layer's projections. Heads are cut over tensor ranks for
all of them; *context* says what pieces of a row exchange, in a decoder where a decoder can use the mechanism, or that
a row must be whole.

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--markdown", action="store_true", help="print the page docs/mechanisms.md")


def run(args: argparse.Namespace) -> int:
    """Print the catalogue."""
    print(page() if args.markdown else "\n".join(_plain()), end="" if args.markdown else "\n")
    return 0


HEADER = ("preset", "source", "what", "decoder", "encoder", "cost", "state", "added", "context")


def page() -> str:
    """The text of docs/mechanisms.md."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| `" + "` | ".join([row[0], " | ".join(row[1:])]) + " |" for row in _rows()]
    return _INTRODUCTION + "\n".join(lines) + "\n"


def _plain() -> list[str]:
    rows = [HEADER, *_rows()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _rows() -> list[tuple[str, ...]]:
    from megakernel.analysis.catalogue import catalogue

    return [
        (
            entry.name,
            entry.source,
            entry.idea.replace("|", "‖"),
            "yes" if entry.causal else "no",
            "yes" if entry.bidirectional else "no",
            "linear" if entry.growth < 2.1 else "quadratic",
            "—" if entry.state is None else f"{entry.state:,}",
            f"{entry.parameters:,}",
            " + ".join(entry.exchanges) or "whole",
        )
        for entry in catalogue()
    ]

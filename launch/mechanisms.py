"""`megakernel dev mechanisms`: every attention preset, where it comes from and what it costs."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megakernel.config import yaml_text

if TYPE_CHECKING:
    from megakernel.analysis.catalogue import Entry

HELP = "list the attention mechanisms: source, cost, state, parameters, layouts"
EXAMPLE = "megakernel dev mechanisms --markdown"

PAGE = Path(__file__).parents[1] / "docs" / "mechanisms.md"

_INTRODUCTION = """# Mechanisms

Every preset of `model.attention`, read off the code: `megakernel dev mechanisms --markdown > docs/mechanisms.md` writes
this page, and a test holds it current. A preset is a name for a point of the algebra; any key can be changed beside it:

```yaml
model:
  attention: {preset: flurka, compression: {rank: 16}}
```

*Equation* is that of the source, where it is one of the four papers whose mechanisms are all here:
{papers}.

Sizes are those of one layer with 4 heads of width 32 on sequences of 512 tokens. *Cost* is how the operations of a
sequence grow with its length. *State* counts the numbers that decoding carries from token to token; without one,
decoding keeps keys or is not possible. *Added* counts learned numbers beside the layer's projections.

"""

_LAYOUTS = """
## Layouts

The axes of `parallel` along which each can be cut. *Tensor* ranks share the heads, whose number they divide; what heads
share, so many of the added numbers, all of them hold. *Sequence parallel* is `parallel.sequence_parallel`: tokens are
gathered before the layer, or landmarks of the input are summed too (then without padding, so not in classifiers).
*Context* names what shards of a sequence exchange: a `state`, whose size does not depend on the tokens; a `halo`, the
end of the shard before, which must be whole blocks; `landmarks`; or tokens for `heads`, whose number on a tensor rank
the shards must then divide. Where they do not, full softmax takes the `ring`: keys and values go round, from shard to
shard (`parallel.softmax_exchange`). A short convolution also looks at the last tokens of the shard before.
Classifiers, whose sequences are padded, keep `parallel.context: 1`.

"""

_SNIPPETS = """
## Configuration

Every preset written out, to be changed at any place. What the keys mean: [configuration.md](configuration.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--markdown", action="store_true", help="print the page docs/mechanisms.md")


def run(args: argparse.Namespace) -> int:
    """Print the catalogue."""
    from megakernel.analysis.catalogue import catalogue

    entries = catalogue()
    if args.markdown:
        print(page(entries), end="")
    else:
        tables = (table(entries) for table in (_overview, _layouts))
        print("\n\n".join("\n".join(_plain(rows)) for rows in tables))
    return 0


def page(entries: "list[Entry]") -> str:
    """The text of docs/mechanisms.md."""
    from megakernel.analysis.catalogue import PAPERS

    papers = ", ".join(f"*{paper}*" for paper in PAPERS)
    overview, layouts = ("\n".join(_markdown(table(entries))) + "\n" for table in (_overview, _layouts))
    trees = {entry.name: {"model": {"attention": entry.tree}} for entry in entries}
    snippets = "".join(
        f"\n### {name}\n\n```yaml\n{yaml_text.write(tree, compact=True)}```\n" for name, tree in trees.items()
    )
    introduction = _INTRODUCTION.replace("{papers}", papers)
    return "".join([introduction, overview, _LAYOUTS, layouts, _SNIPPETS, snippets])


def _overview(entries: "list[Entry]") -> list[list[str]]:
    from megakernel.analysis.catalogue import SOURCES

    rows = [["preset", "source", "equation", "what", "decoder", "encoder", "cost", "state", "added"]]
    for entry in entries:
        source = SOURCES[entry.name]
        cells = [entry.name, source.paper, source.equation or "—", source.idea.replace("|", "‖")]
        cells += ["yes" if kind in entry.layers else "no" for kind in ("decoder", "encoder")]
        cells.append("linear" if entry.growth < 2.1 else "quadratic")
        cells.append("—" if entry.state_size is None else f"{entry.state_size:,}")
        rows.append([*cells, f"{entry.parameters():,}"])
    return rows


def _layouts(entries: "list[Entry]") -> list[list[str]]:
    rows = [["preset", "tensor", "sequence parallel", "pipeline", "context, decoder", "context, encoder"]]
    for entry in entries:
        shared = entry.parameters(shared=True)
        exchanged = {kind: layer.spec.exchanged(layer.causal) for kind, layer in entry.layers.items()}
        cells = [entry.name, f"heads, {shared:,} shared" if shared else "heads"]
        cells += ["tokens + landmarks" if entry.form.compresses_input else "tokens", "yes"]
        rows.append(cells + [" + ".join(exchanged.get(kind, ())) or "—" for kind in ("decoder", "encoder")])
    return rows


def _markdown(rows: list[list[str]]) -> Iterator[str]:
    header, *entries = rows
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for name, *cells in entries:
        yield f"| {' | '.join([f'`{name}`', *cells])} |"


def _plain(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()

"""`megakernel dev mechanisms`: every attention preset, with its source and cost."""

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

Every preset of `model.attention`, generated from the code: `megakernel dev mechanisms --markdown > docs/mechanisms.md`
writes this page, and a test keeps it current. A preset is a name for a mechanism; any of its keys can be changed:

```yaml
model:
  attention: {preset: flurka, compression: {rank: 16}}
```

*Equation* is the number in the source if that is one of the four papers whose mechanisms are all implemented:
{papers}.

Sizes are for one layer with 4 heads of width 32 on sequences of 512 tokens. *Cost* is how the operations of a
sequence grow with its length. *State* is how many numbers decoding carries from token to token; without one, decoding
keeps keys or is not possible. *Added* is the number of learned parameters besides the layer's projections.

"""

_LAYOUTS = """
## Layouts

How each preset can be partitioned along the axes of `parallel`. *Tensor* ranks split the heads, so their number must
divide the number of heads; every rank holds the parameters that heads share. With fewer key heads than tensor ranks
(`model.num_kv_heads: 2`, `parallel.tensor: 8`), equally many neighbouring ranks have the same key head. Each of them
computes a part of its keys and values, which they gather, and has a copy of its other parameters, such as a feature
map's, whose gradients they sum. `selected` and `flurka_selected` refuse this, because all queries of a key head choose
blocks together. *Sequence parallel* is
`parallel.sequence_parallel`: tokens are gathered before the layer, and landmarks of the input are summed, too.
*Context* names what shards of a sequence exchange: a `state`, whose size does not depend on the number of tokens; a
`halo`, the end of the previous shard, in whole blocks; `landmarks`; `tokens`, the keys and values of all shards; or
tokens for `heads`, if the number of shards divides the heads of a tensor rank. If it does not, full softmax uses the
`ring`: keys and values pass from shard to shard (`parallel.softmax_exchange`). A sliding window (`window`) that reaches
no further than the previous shard takes the tokens that it needs from there, and so does a short convolution.
Classifiers, whose sequences are padded, keep `parallel.context: 1`.

"""

_SNIPPETS = """
## Configuration

Every preset with all its keys, which [configuration.md](configuration.md) explains.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--markdown", action="store_true", help="print docs/mechanisms.md")


def run(args: argparse.Namespace) -> int:
    """Print the tables, or the Markdown page."""
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
        cells += ["tokens + landmarks" if entry.attention.compresses_input else "tokens", "yes"]
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

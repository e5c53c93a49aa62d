"""The picture of the README: what a token costs to train on at a million tokens, and whether the model copies.

    python -m benchmarks.copying_picture --out docs/images/copying.svg

Losses are those of the pages in benchmarks/results, of models of 5.9 million parameters after 9.8 million tokens, from
position 1,024 of 2,048 on. A filled point is the first seed, a hollow one the second, where it was measured. Costs are
counted for configs/model/1b.yaml with the same kinds of layers, with the selection that was trained; a note says what
the selection of configs/model/350m-selected.yaml costs.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.page import docstring_parser, run_main
from megakernel.config import Model, UserError, yaml_text
from megakernel.model.flops import training_flops_per_token

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SEQ_LEN, VOCAB_SIZE = 2**20, 50_257

WINDOW = {"preset": "softmax", "window": 128, "short_convolution": 4}
PARTS = {"short_convolution": 4, "output_norm": True, "output_gate": "silu"}
MEASURED = {
    "preset": "selected",
    **PARTS,
    "near": {"block_size": 32, "blocks": 2},
    "selection": {"blocks": 16, "landmarks": 4, "unit": "token", "rope": "none"},
}


class Shown(NamedTuple):
    """One model, a point for every seed."""

    label: str
    pages: list[str]
    """Files of the results, without their ending: one for every seed, 0 first."""

    model: str
    """Name of the row."""

    layers: list[dict[str, object]]
    """The pattern of attention layers."""

    side: str = "right"
    """Where the label is: right, above or below."""

    note: str = ""
    """More lines for the label; {configured} stands for the cost of CONFIGURED."""

    @property
    def model_layers(self) -> dict[str, object]:
        """The keys of a model that say what its layers are."""
        return {"attention": self.layers[0], "attention_pattern": self.layers}


CONFIGURED = yaml_text.read(ROOT / "configs" / "model" / "350m-selected.yaml")["model"]
"""The shipped layers with chosen blocks, which have not been trained on text."""

HYBRIDS, SECOND_SEED = "far_context_hybrids_cpu", "far_context_second_seed_cpu"

SHOWN = [
    Shown("windows", [HYBRIDS], "local_convolution", [WINDOW], "above"),
    Shown("FLuRKA", [HYBRIDS], "flurka_convolution", [{"preset": "flurka", "short_convolution": 4}]),
    Shown(
        "windows, 1 of 4 layers chooses\n16 blocks of 32, one level",
        ["far_context_unrotated_cpu", "far_context_unrotated_second_seed_cpu"],
        "local_selected_unrotated",
        [*[WINDOW] * 3, MEASURED],
        "above",
        "(as configured, 8 of 64, two levels:\n{configured:.1f} GFLOP, not yet trained on text)",
    ),
    Shown(
        "windows, 1 of 4 layers\nsoftmax",
        [HYBRIDS, SECOND_SEED],
        "local_softmax",
        [*[WINDOW] * 3, {"preset": "softmax", **PARTS}],
        "below",
    ),
    Shown(
        "softmax",
        ["far_context_longer_cpu", SECOND_SEED],
        "softmax_around",
        [{"preset": "softmax", **PARTS}],
        "above",
    ),
]


PLACES = {
    "right": ((9, 0), "left", "center"),
    "above": ((0, 9), "center", "bottom"),
    "below": ((0, -9), "center", "top"),
}
"""Side of a model's points -> offset of its label in points, horizontal and vertical alignment."""


def losses_of(shown: Shown) -> list[float]:
    """Nats per token from position 1,024 on, by seed, from the pages. Raises UserError if a page has no such row."""
    losses = []
    for seed, page in enumerate(shown.pages):
        text = (RESULTS / f"{page}.md").read_text(encoding="utf-8")
        row = rf"^\| `{shown.model}` \| 2,048 \| {seed} \|(?: [0-9.]+ \|){{2}} \*\*([0-9.]+)\*\*"
        found = re.search(row, text, re.MULTILINE)
        if found is None:
            raise UserError(
                f"benchmarks/results/{page}.md has no row of {shown.model} with seed {seed}; measure it again"
            )
        losses.append(float(found[1]))
    return losses


def gflops_of(layers: dict[str, object], seq_len: int = SEQ_LEN) -> float:
    """Training GFLOP per token of a 1B model of such layers: `attention` and `attention_pattern`."""
    tree = yaml_text.read(ROOT / "configs" / "model" / "1b.yaml")["model"]
    return training_flops_per_token(Model.model_validate({**tree, **layers}), seq_len, VOCAB_SIZE) / 1e9


def draw(out: Path) -> None:
    """Write the picture; the file ending says its format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # The same bytes at every run.
    matplotlib.rcParams |= {"svg.hashsalt": "megakernel", "svg.fonttype": "path"}
    figure, axes = pyplot.subplots(figsize=(7.2, 3.2))
    for shown in SHOWN:
        x, losses = gflops_of(shown.model_layers), losses_of(shown)
        color = "#0072b2" if "chooses" in shown.label else "#777777"
        fills = [color, *["none"] * (len(losses) - 1)]
        axes.scatter([x] * len(losses), losses, s=60, facecolors=fills, edgecolors=color, zorder=3)
        place, across, up = PLACES[shown.side]
        text = f"{shown.label}: {', '.join(f'{loss:.2f}' for loss in losses)}"
        if shown.note:
            text += "\n" + shown.note.format(configured=gflops_of(CONFIGURED))
        anchor = {"above": max(losses), "below": min(losses)}.get(shown.side, sum(losses) / len(losses))
        axes.annotate(
            text, (x, anchor), textcoords="offset points", xytext=place, ha=across, va=up, fontsize=9
        )
    axes.set_xscale("log")
    axes.set_xlim(3.5, 500)
    axes.set_ylim(2.55, 4.25)
    axes.set_xlabel("training GFLOP per token at a million tokens (1B model, counted)")
    axes.set_ylabel("nats per token,\nfrom position 1,024 on")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, dpi=150)


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = docstring_parser(__doc__)
    options.add_argument(
        "--out", type=Path, required=True, help="file to write, such as docs/images/copying.svg"
    )
    return options


def main() -> int:
    """Draw it."""
    draw(parser().parse_args().out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))

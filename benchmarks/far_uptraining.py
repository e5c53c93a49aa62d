"""A dense model that uses its far context becomes FLuRKA, and what others make of it: what is reached, what is kept.

    OMP_NUM_THREADS=1 python -m benchmarks.far_uptraining --out benchmarks/results/far_uptraining_cpu.md

The dense model is `softmax_around` of benchmarks.far_context, trained on twice as many tokens. Each student is made by
`megakernel uptrain benchmarks/far_uptraining.yaml` of it, and measured as the models there. Runs lie in
runs/far_uptraining; what is done is read, not repeated.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.far_context import COLUMNS, READING, Measures, Run, measure, prepare, state_of
from benchmarks.page import add_out, ended, give, one_table, table_row, typed
from benchmarks.trained import named, uptrained
from megakernel.config import Config, load
from megakernel.uptraining.report import recovered
from megakernel.uptraining.stages import DENSE, MAIN

CONFIG = Path(__file__).with_suffix(".yaml")
DENSE_RUN = Run("softmax_around", 2048, 0, 9_830_400)
LENGTH = DENSE_RUN.length

TRANSFER = ["uptrain.transfer={steps: 20, lr: 1e-2}", "training.steps=100"]
"""Mechanisms alone learn in a sixth of the steps."""


def attention(preset: str, **keys: Any) -> str:
    """The override of a student's attention, with what the dense model has around its own."""
    return f"model.attention={json.dumps(named(f'{preset}+convolution+gate') | keys)}"


WINDOWS = {"block_size": 16, "blocks": 2}
NEAR = {"blocks": 2, "join": "shared"}
EVERY_TOKEN = {"compression": {"block_size": 16, "rank": 16}, "near": NEAR}
LONGER = {"compression": {"block_size": 64, "rank": 8}, "near": NEAR}

STUDENTS: dict[str, list[str]] = {
    "flurka": ["uptrain.train_dense=true"],
    "flurka, transfer first": TRANSFER,
    "flurka, two layers kept": [*TRANSFER, "uptrain.layers.keep=2"],
    "flurka, blocks of 64": [attention("flurka", **LONGER)],
    "lolcats": [
        attention("flurka", **EVERY_TOKEN),
        *TRANSFER,
        "optimizer.trained=lora",
        "init.moments=null",
    ],
    "window": [attention("local", near=WINDOWS)],
    "gated_deltanet": [attention("gated_deltanet")],
}
"""Name -> what is laid over benchmarks/far_uptraining.yaml.

lolcats: that paper's recipe: windows, feature maps of every token before them, learned by attention transfer, and
low-rank updates. window: the dense model through windows of the same size, without anything behind them.
"""


class Row(NamedTuple):
    """A model of the table."""

    name: str
    measures: Measures
    state: int
    swapped: float | None = None
    """Loss before any step, of the validation samples of training."""

    share: float | None = None
    """Of the perplexity between that and the dense model's, trained on, what is recovered."""

    def line(self) -> str:
        """Its line."""
        swapped = "" if self.swapped is None else f"{self.swapped:.4f}"
        share = "" if self.share is None else f"**{self.share:.1%}**"
        return table_row([self.name, swapped, *self.measures.cells(), share, f"{self.state:,}"])


def overrides_of(student: str) -> list[str]:
    """What is laid over benchmarks/far_uptraining.yaml."""
    name = "-".join(student.replace(",", "").split())
    return [f"run.name={name}", *STUDENTS[student]]


def config_of(student: str) -> Config:
    """The up-training of a student."""
    return load(CONFIG, overrides_of(student))


def stage_of(folder: Path, kind: str) -> tuple[Measures, int]:
    """What the model of a stage of an up-training has learned, and its state."""
    [folder] = folder.glob(f"*-{kind}")
    config = load(folder / "config.yaml")
    return Measures.of(folder, config.training.steps, LENGTH), state_of(config.model, LENGTH)


def rows(students: Iterable[str]) -> list[Row]:
    """Train and measure the dense model, what it becomes by itself, and these students, or read what is there."""
    dense = measure(DENSE_RUN)
    state = state_of(DENSE_RUN.config().model, LENGTH)
    folder, report = uptrained(CONFIG, overrides_of("flurka"))
    end = report["trained_on"]["loss"]
    found = [Row("dense", dense.measures, state), Row("dense, trained on", *stage_of(folder, DENSE))]
    for student in students:
        folder, report = uptrained(CONFIG, overrides_of(student))
        swapped, [*_, main] = report["swapped"]["loss"], report["stages"]
        share = recovered(swapped, main["loss"], end)
        found.append(Row(student, *stage_of(folder, MAIN), swapped, share))
        print(found[-1].line(), flush=True)
    return found


def page(found: Sequence[Row], command: str) -> str:
    """The table and what it is of."""
    training, dense = load(CONFIG).training, DENSE_RUN.config()
    tokens = training.consumed(training.steps)[1]
    columns = ("model", "swapped", *COLUMNS, "of dense, trained on", "state")
    text = (
        f"The dense model, `softmax_around` of [far_context_cpu.md](far_context_cpu.md), has read "
        f"{DENSE_RUN.tokens:,} tokens at a constant learning rate of {dense.optimizer.lr:g}; each student reads "
        f"{tokens:,} more, in which it falls to 0, in {training.dtype}; so does *dense, trained on*. *Swapped*: "
        f"the loss before any step. *Of dense, trained on*: the share that is recovered of the perplexity between "
        f"the swapped student and the dense model, trained on, over {training.eval_samples} sequences of "
        f"{LENGTH:,} tokens. {READING} One seed."
    )
    title = "Up-training a dense model that uses its far context"
    written = [f"* `{row.name}`: `{' '.join(STUDENTS[row.name])}`" for row in found if row.name in STUDENTS]
    lines = (row.line() for row in found)
    return "\n".join([one_table(title, command, text, columns, lines), *written, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """0 once every student is measured and the page is written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=STUDENTS, default=list(STUDENTS), metavar="STUDENT")
    add_out(parser)
    given = sys.argv[1:] if argv is None else list(argv)
    arguments = parser.parse_args(given)
    prepare(load(CONFIG).data.train[0].path)
    found = rows(arguments.only)
    give(page(found, typed("far_uptraining", given)), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))

"""Up-training a dense model that uses its far context, to FLuRKA and to other mechanisms.

    OMP_NUM_THREADS=1 python -m benchmarks.far_uptraining --out benchmarks/results/far_uptraining_cpu.md

The dense model is `softmax_around` of benchmarks.far_context, trained on twice as many tokens. `megakernel uptrain
benchmarks/far_uptraining.yaml` makes each student from it; they are measured like the models there. Runs are in
runs/far_uptraining; finished ones are read, not repeated.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.far_context import COLUMN_NOTES, COLUMNS, Measures, Run, measure, prepare, state_size
from benchmarks.page import command_line, page_parser, run_main, table_page, table_row, write_page
from benchmarks.training_runs import preset_tree, uptrain_run
from megakernel.checkpoint.trained_run import DENSE
from megakernel.config import load
from megakernel.uptraining.report import recovered
from megakernel.uptraining.stages import MAIN

CONFIG = Path(__file__).with_suffix(".yaml")
DENSE_RUN = Run("softmax_around", 2048, 0, 9_830_400)
LENGTH = DENSE_RUN.length

TRANSFER = ["uptrain.transfer={steps: 20, lr: 1e-2}", "training.steps=100"]
"""A sixth of the steps train the attention layers alone."""


def attention_override(preset: str, **keys: Any) -> str:
    """The override of a student's attention, with the same parts around it as in the dense model."""
    return f"model.attention={json.dumps(preset_tree(f'{preset}+convolution+gate') | keys)}"


WINDOWS = {"block_size": 16, "blocks": 2}
NEAR = {"blocks": 2, "join": "shared"}
EVERY_TOKEN = {"compression": {"block_size": 16, "rank": 16}, "near": NEAR}
LONGER = {"compression": {"block_size": 64, "rank": 8}, "near": NEAR}

STUDENTS: dict[str, list[str]] = {
    "flurka": ["uptrain.train_dense=true"],
    "flurka, transfer first": TRANSFER,
    "flurka, two layers kept": [*TRANSFER, "uptrain.layers.keep=2"],
    "flurka, blocks of 64": [attention_override("flurka", **LONGER)],
    "lolcats": [
        attention_override("flurka", **EVERY_TOKEN),
        *TRANSFER,
        "optimizer.trained=lora",
        "init.moments=null",
    ],
    "window": [attention_override("local", near=WINDOWS)],
    "gated_deltanet": [attention_override("gated_deltanet")],
}
"""Name -> overrides of benchmarks/far_uptraining.yaml.

lolcats: that paper's recipe: windows, feature maps for every token before them, learned by attention transfer, and
low-rank updates. window: windows of the same size and no far context.
"""


class ModelRow(NamedTuple):
    """One model's row of the table."""

    name: str
    measures: Measures
    state: int
    swapped: float | None = None
    """Loss before the first step, on the training run's validation samples."""

    recovered_share: float | None = None
    """Share of the perplexity lost by swapping that is recovered, relative to the dense model trained on."""

    def row(self) -> str:
        """The table row."""
        swapped = "" if self.swapped is None else f"{self.swapped:.4f}"
        recovered_share = "" if self.recovered_share is None else f"**{self.recovered_share:.1%}**"
        return table_row([self.name, swapped, *self.measures.cells(), recovered_share, f"{self.state:,}"])


def overrides_of(student: str) -> list[str]:
    """A student's overrides of benchmarks/far_uptraining.yaml."""
    name = "-".join(student.replace(",", "").split())
    return [f"run.name={name}", *STUDENTS[student]]


def measure_stage(folder: Path, kind: str) -> tuple[Measures, int]:
    """The measurements of an up-training stage's model, and the size of its decoding state."""
    [folder] = folder.glob(f"*-{kind}")
    config = load(folder / "config.yaml")
    return Measures.of(folder, config.training.steps, LENGTH), state_size(config.model, LENGTH)


def measure_all(students: Iterable[str]) -> list[ModelRow]:
    """Train and measure the dense model, the same trained on, and these students, unless that is done."""
    dense = measure(DENSE_RUN)
    state = state_size(DENSE_RUN.config().model, LENGTH)
    folder, report = uptrain_run(CONFIG, overrides_of("flurka"))
    end = report["trained_on"]["loss"]
    rows = [
        ModelRow("dense", dense.measures, state),
        ModelRow("dense, trained on", *measure_stage(folder, DENSE)),
    ]
    for student in students:
        folder, report = uptrain_run(CONFIG, overrides_of(student))
        swapped, [*_, main] = report["swapped"]["loss"], report["stages"]
        recovered_share = recovered(swapped, main["loss"], end)
        rows.append(ModelRow(student, *measure_stage(folder, MAIN), swapped, recovered_share))
        print(rows[-1].row(), flush=True)
    return rows


def page(rows: Sequence[ModelRow], command: str) -> str:
    """The page: explanation, table, and overrides of the students."""
    training, dense = load(CONFIG).training, DENSE_RUN.config()
    tokens = training.consumed(training.steps)[1]
    columns = ("model", "swapped", *COLUMNS, "of dense, trained on", "state")
    text = (
        f"The dense model, `softmax_around` of [far_context_cpu.md](far_context_cpu.md), has read "
        f"{DENSE_RUN.tokens:,} tokens at a constant learning rate of {dense.optimizer.lr:g}; each student and *dense, "
        f"trained on* read {tokens:,} more in {training.dtype}, while it falls to 0. *Swapped*: the loss before the "
        f"first step. *Of dense, trained on*: the recovered share of the perplexity lost by swapping, relative to the "
        f"dense model trained on, over {training.eval_samples} sequences of {LENGTH:,} tokens. {COLUMN_NOTES} One seed."
    )
    title = "Up-training a dense model that uses its far context"
    students = [f"* `{row.name}`: `{' '.join(STUDENTS[row.name])}`" for row in rows if row.name in STUDENTS]
    lines = (row.row() for row in rows)
    return "\n".join([table_page(title, command, text, columns, lines), *students, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every student and write the page."""
    parser = page_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=STUDENTS, default=list(STUDENTS), metavar="STUDENT")
    arguments = parser.parse_args(argv)
    prepare(load(CONFIG).data.train[0].path)
    rows = measure_all(arguments.only)
    write_page(page(rows, command_line("far_uptraining", argv)), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))

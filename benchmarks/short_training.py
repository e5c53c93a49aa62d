"""Check that every mechanism trains: 200 steps of a small model each, on real text, in bfloat16.

    megakernel prepare --source stdlib --tokenizer byte --out data/stdlib
    OMP_NUM_THREADS=1 python -m benchmarks.short_training --out benchmarks/results/short_training_cpu.md

Each preset is trained by `megakernel pretrain benchmarks/short_training.yaml`, as a decoder if it can be one, otherwise
as an encoder; softmax as both, for comparison with the encoders. A control of each kind has sequences of one token: it
shows what the rest of the model learns alone. Runs are in runs/short_training; finished ones are read, not repeated.
No page is written unless every loss fell, on the training and the held-out text, and every number was finite.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.page import page_parser, table_page, table_row, write_page
from benchmarks.training_runs import train_run, with_small_blocks
from megakernel.config import PRESETS, Attention, UserError, expand_preset, load
from megakernel.training.observing.metrics_writer import read_metrics

CONFIG = Path(__file__).with_suffix(".yaml")
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.short_training"
AVERAGED = 10
"""The first and the last training loss are means over this many steps."""

BLOCK, RANK, LANDMARKS = 32, 4, 64
PRESET_SIZES = {
    "eva": {"window_size": 32, "chunk_size": 8},
    "skyformer": {"features": 32},
    "nystromformer": {"landmarks": 32},
}
"""Sizes that divide a sequence of 256 tokens as the presets' sizes divide longer ones."""

CONTROL = "one token"
ONE_TOKEN = {"seq_len": 1, "global_batch_size": 2048, "micro_batch_size": 2048, "eval_samples": 169_984}
"""Sequences of one token, with as many tokens per step and evaluation as CONFIG."""


@dataclass(frozen=True)
class Run:
    """One model to train."""

    mechanism: str
    """A preset, or CONTROL."""

    kind: str
    """`model.kind`."""

    overrides: list[str]
    """Overrides of CONFIG."""

    def __str__(self) -> str:
        return f"{self.mechanism} as {self.kind}"


def runs(presets: Iterable[str]) -> Iterator[Run]:
    """The controls, then each preset as the kinds of model that it is trained as."""
    for kind in ("causal_lm", "masked_lm"):
        keys = {f"training.{key}": value for key, value in ONE_TOKEN.items()}
        yield _run(CONTROL, kind, {"model.attention": "softmax", **keys})
    for preset in presets:
        tree = scaled_preset(preset)
        attention = Attention.model_validate(expand_preset(tree))
        if attention.mixes_future_tokens is None:
            yield _run(preset, "causal_lm", {"model.attention": tree})
        if attention.mixes_future_tokens or preset == "softmax":
            # A mechanism that mixes documents sees a sequence as one text.
            isolated = attention.mixes_documents is None
            yield _run(preset, "masked_lm", {"model.attention": tree, "data.isolate_documents": isolated})


def _run(mechanism: str, kind: str, keys: dict[str, Any]) -> Run:
    name = f"{mechanism.replace(' ', '-')}-{kind}"
    keys = {"run.name": name, "model.kind": kind, **keys}
    return Run(mechanism, kind, [f"{key}={json.dumps(value)}" for key, value in keys.items()])


def scaled_preset(preset: str) -> dict[str, Any]:
    """The preset with block, window and landmark sizes for sequences of 256 tokens."""
    tree = with_small_blocks(preset, BLOCK, RANK, LANDMARKS)
    return tree | ({preset: PRESET_SIZES[preset]} if preset in PRESET_SIZES else {})


@dataclass(frozen=True)
class TrainingResult:
    """The numbers of a run's metrics.jsonl; None stands for a number that was not finite."""

    run: Run
    losses: list[float | None]
    held_out: list[float | None]
    gradient_norms: list[float | None]
    skipped_steps: int
    step_times: list[float]

    @property
    def finite(self) -> bool:
        """Whether every loss and every gradient was finite."""
        return not self.skipped_steps and None not in [*self.losses, *self.held_out, *self.gradient_norms]

    @property
    def first(self) -> float:
        """Mean training loss of the first steps."""
        return _mean(self.losses[:AVERAGED])

    @property
    def last(self) -> float:
        """Mean training loss of the last steps."""
        return _mean(self.losses[-AVERAGED:])

    @property
    def before(self) -> float:
        """Held-out loss of the initial weights."""
        return _mean(self.held_out[:1])

    @property
    def after(self) -> float:
        """Held-out loss of the trained weights."""
        return _mean(self.held_out[-1:])

    def failure(self) -> str | None:
        """Why the run did not train; None if it did."""
        if not self.finite:
            return f"{self.run}: a loss or gradient was not finite ({self.skipped_steps} steps skipped)"
        if self.last >= self.first:
            return f"{self.run}: the training loss did not fall, {self.first:.4f} to {self.last:.4f}"
        if self.after >= self.before:
            return f"{self.run}: the held-out loss did not fall, {self.before:.4f} to {self.after:.4f}"
        return None


def _mean(values: Iterable[float | None]) -> float:
    return statistics.fmean(value for value in values if value is not None)


def train(run: Run) -> TrainingResult | str:
    """Train a run unless that is done; returns its result, or why it did not train."""
    try:
        lines = read_metrics(train_run(CONFIG, run.overrides))
    except UserError as error:
        return f"{run}: {error}"
    steps = [line for line in lines if "train/loss" in line]
    held_out = [line["eval/loss"] for line in lines if "eval/loss" in line]
    if len(steps) != load(CONFIG, run.overrides).training.steps or len(held_out) != 2:
        return f"{run}: its metrics.jsonl is not that of a whole run"
    result = TrainingResult(
        run,
        losses=[line["train/loss"] for line in steps],
        held_out=held_out,
        gradient_norms=[line["train/grad_norm"] for line in steps],
        skipped_steps=int(steps[-1]["train/skipped_steps"]),
        step_times=[line["throughput/step_time"] for line in steps],
    )
    return result.failure() or result


def row(result: TrainingResult) -> str:
    """The table row of a run."""
    name = result.run.mechanism
    cells = [name if name == CONTROL else f"`{name}`", result.run.kind]
    cells += [f"{loss:.3f}" for loss in (result.first, result.last, result.before)]
    cells += [f"**{result.after:.3f}**", "yes" if result.finite else "no"]
    return table_row([*cells, f"{statistics.median(result.step_times):.3f}"])


def page(results: list[TrainingResult]) -> str:
    """The page; rows are sorted by kind of model, decoders first, then by held-out loss."""
    columns = ["preset", "model", f"loss, first {AVERAGED}", f"last {AVERAGED}", "held-out before", "after"]
    columns += ["finite", "s/step"]
    by_loss = sorted(results, key=lambda result: (result.run.kind, result.after))
    text = (
        "2 layers x 64, 4 heads, context 256, 200 steps of 2,048 tokens, one process. Losses are nats per byte "
        "of the Python standard library's source, means over training steps and over all held-out text. A masked "
        "model also sees what follows a hidden byte, so its losses do not compare with a decoder's. Seconds are those "
        f"of the median step.\n\n*{CONTROL}* is the same model on sequences of one token, with nothing to attend to. "
        "A mechanism that ends clearly below its held-out loss has learned from other tokens."
    )
    return table_page("200 steps of every mechanism", COMMAND, text, columns, map(row, by_loss), ", bfloat16")


def main(argv: Sequence[str] | None = None) -> int:
    """Train every run and write the page; if a run did not train, print why and return 1."""
    parser = page_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PRESETS, default=list(PRESETS), metavar="PRESET")
    arguments = parser.parse_args(argv)
    results: list[TrainingResult | str] = []
    for run in runs(arguments.only):
        results.append(result := train(run))
        print(result if isinstance(result, str) else row(result), flush=True)
    if failures := [result for result in results if isinstance(result, str)]:
        print("no page is written:", *failures, sep="\n  ", file=sys.stderr)
        return 1
    text = page([result for result in results if isinstance(result, TrainingResult)])
    write_page(text, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

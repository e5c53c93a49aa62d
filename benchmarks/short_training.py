"""Whether every mechanism trains: 200 steps of one small model each, on real text, in bfloat16.

    megakernel prepare --source stdlib --tokenizer byte --out data/stdlib
    OMP_NUM_THREADS=1 python -m benchmarks.short_training --out benchmarks/results/short_training_cpu.md

Each preset is trained by `megakernel pretrain benchmarks/short_training.yaml`, as a decoder where it can be one and
else as an encoder; softmax as both, so that the encoders have it beside them. A control of each kind has sequences of
one
token: what the rest of the model learns by itself. Runs lie in runs/short_training; those that are done are read, not
repeated. No page is written unless every loss fell, on the training text and on the held-out text, and every number
was finite.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.page import add_out, give, one_table, table_row
from benchmarks.trained import in_blocks, trained
from megakernel.config import PRESETS, Attention, UserError, expand_preset, load
from megakernel.training.observing.metrics_writer import logged

CONFIG = Path(__file__).with_suffix(".yaml")
COMMAND = "OMP_NUM_THREADS=1 python -m benchmarks.short_training"
AVERAGED = 10
"""Steps whose mean is the first and the last training loss."""

BLOCK, RANK, LANDMARKS = 32, 4, 64
OWN = {
    "eva": {"window_size": 32, "chunk_size": 8},
    "skyformer": {"features": 32},
    "nystromformer": {"landmarks": 32},
}
"""Sizes that divide a sequence of 256 tokens as the presets' divide longer ones."""

CONTROL = "one token"
ALONE = {"seq_len": 1, "global_batch_size": 2048, "micro_batch_size": 2048, "eval_samples": 169_984}
"""As many tokens in a step and in an evaluation as CONFIG has, in sequences of one."""


@dataclass(frozen=True)
class Run:
    """One model to train."""

    mechanism: str
    """A preset, or CONTROL."""

    kind: str
    """Kind of model."""

    overrides: list[str]
    """Overrides of CONFIG."""

    def __str__(self) -> str:
        return f"{self.mechanism} as {self.kind}"


def runs(presets: Iterable[str]) -> Iterator[Run]:
    """The controls, then each preset as the kind of model that it can be."""
    for kind in ("causal_lm", "masked_lm"):
        keys = {f"training.{key}": value for key, value in ALONE.items()}
        yield _run(CONTROL, kind, {"model.attention": "softmax", **keys})
    for preset in presets:
        tree = attention(preset)
        form = Attention.model_validate(expand_preset(tree))
        if form.mixes_future_tokens is None:
            yield _run(preset, "causal_lm", {"model.attention": tree})
        if form.mixes_future_tokens or preset == "softmax":
            # A sequence is one text where a mechanism cannot keep its documents apart.
            isolated = form.mixes_documents is None
            yield _run(preset, "masked_lm", {"model.attention": tree, "data.isolate_documents": isolated})


def _run(mechanism: str, kind: str, keys: dict[str, Any]) -> Run:
    name = f"{mechanism.replace(' ', '-')}-{kind}"
    keys = {"run.name": name, "model.kind": kind, **keys}
    return Run(mechanism, kind, [f"{key}={json.dumps(value)}" for key, value in keys.items()])


def attention(preset: str) -> dict[str, Any]:
    """The preset, with what divides or shortens a sequence fitted to 256 tokens."""
    tree = in_blocks(preset, BLOCK, RANK, LANDMARKS)
    return tree | ({preset: OWN[preset]} if preset in OWN else {})


@dataclass(frozen=True)
class Outcome:
    """The numbers of a run's metrics.jsonl; None stands for one that was not finite."""

    run: Run
    losses: list[float | None]
    held_out: list[float | None]
    gradient_norms: list[float | None]
    skipped_steps: int
    step_times: list[float]

    @property
    def finite(self) -> bool:
        """Whether every loss and every gradient was."""
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
        """Held-out loss of the weights as they were drawn."""
        return _mean(self.held_out[:1])

    @property
    def after(self) -> float:
        """Held-out loss of the trained weights."""
        return _mean(self.held_out[-1:])

    def refusal(self) -> str | None:
        """Why this is no training; None where it is."""
        if not self.finite:
            return f"{self.run}: a loss or gradient was not finite ({self.skipped_steps} steps skipped)"
        if self.last >= self.first:
            return f"{self.run}: the training loss did not fall, {self.first:.4f} to {self.last:.4f}"
        if self.after >= self.before:
            return f"{self.run}: the held-out loss did not fall, {self.before:.4f} to {self.after:.4f}"
        return None


def _mean(values: Iterable[float | None]) -> float:
    return statistics.fmean(value for value in values if value is not None)


def train(run: Run) -> Outcome | str:
    """The outcome of a run, trained now unless it is done; or why it is no training."""
    try:
        lines = logged(trained(CONFIG, run.overrides))
    except UserError as error:
        return f"{run}: {error}"
    steps = [line for line in lines if "train/loss" in line]
    held_out = [line["eval/loss"] for line in lines if "eval/loss" in line]
    if len(steps) != load(CONFIG, run.overrides).training.steps or len(held_out) != 2:
        return f"{run}: its metrics.jsonl is not that of a whole run"
    found = Outcome(
        run,
        losses=[line["train/loss"] for line in steps],
        held_out=held_out,
        gradient_norms=[line["train/grad_norm"] for line in steps],
        skipped_steps=int(steps[-1]["train/skipped_steps"]),
        step_times=[line["throughput/step_time"] for line in steps],
    )
    return found.refusal() or found


def row(found: Outcome) -> str:
    """The line of the table for what trained."""
    name = found.run.mechanism
    cells = [name if name == CONTROL else f"`{name}`", found.run.kind]
    cells += [f"{loss:.3f}" for loss in (found.first, found.last, found.before)]
    cells += [f"**{found.after:.3f}**", "yes" if found.finite else "no"]
    return table_row([*cells, f"{statistics.median(found.step_times):.3f}"])


def page(outcomes: list[Outcome]) -> str:
    """The table with what it was measured by, decoders first, the lowest held-out loss first."""
    columns = ["preset", "model", f"loss, first {AVERAGED}", f"last {AVERAGED}", "held-out before", "after"]
    columns += ["finite", "s/step"]
    ordered = sorted(outcomes, key=lambda found: (found.run.kind, found.after))
    text = (
        "2 layers x 64, 4 heads, context 256, 200 steps of 2,048 tokens, one process. Losses are nats per byte "
        "of the Python standard library's source, means over training steps and over all held-out text. A masked "
        "model sees what follows a hidden byte too: the two kinds do not compare. Seconds are the median step's.\n\n"
        f"*{CONTROL}* is the same model on sequences of one token, with nothing to attend to. What ends clearly "
        "below its held-out loss has learned from other tokens."
    )
    return one_table("200 steps of every mechanism", COMMAND, text, columns, map(row, ordered), ", bfloat16")


def main(argv: Sequence[str] | None = None) -> int:
    """0 where every run trained, and the page is written; 1 where one did not, which is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PRESETS, default=list(PRESETS), metavar="PRESET")
    add_out(parser)
    arguments = parser.parse_args(argv)
    results: list[Outcome | str] = []
    for run in runs(arguments.only):
        results.append(found := train(run))
        print(found if isinstance(found, str) else row(found), flush=True)
    if refusals := [found for found in results if isinstance(found, str)]:
        print("no page is written:", *refusals, sep="\n  ", file=sys.stderr)
        return 1
    text = page([found for found in results if isinstance(found, Outcome)])
    give(text, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

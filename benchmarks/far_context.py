"""What the far context is worth to a mechanism: small models on long texts, all of the same sizes, at equal tokens.

    OMP_NUM_THREADS=1 python -m benchmarks.far_context --out benchmarks/results/far_context_cpu.md

Each model is trained by `megakernel pretrain benchmarks/far_context.yaml` on `benchmarks.repositories`, whose documents
are longer than any sequence, and measured by `megakernel evaluate`. The learning rate is constant, so `--tokens` may be
raised later: runs go on where they stand. Runs lie in runs/far_context; what is done is read, not repeated.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import repositories
from benchmarks.page import add_out, ended, give, one_table, table_row, typed
from benchmarks.trained import curve, measured, megakernel, named, trained
from megakernel.config import Config, Model, load
from megakernel.config.mechanisms import Shape

CONFIG = Path(__file__).with_suffix(".yaml")
TEXT = Path("data/repositories")
TOKENIZER = "bpe:8192"

MODELS: dict[str, Any] = {
    **{name: name for name in ("softmax", "linear", "gated_deltanet", "local", "flurka", "flurka_decay")},
    **{f"{name}_convolution": named(f"{name}+convolution") for name in ("softmax", "local", "flurka")},
    "flurka_gate": named("flurka+gate"),
    **{f"{name}_around": named(f"{name}+convolution+gate") for name in ("softmax", "local", "flurka")},
    "flurka_best": named("flurka_decay+convolution+gate"),
    "flurka_deltanet": [named("flurka+convolution"), "gated_deltanet"],
    "local_deltanet": [named("local+convolution"), "gated_deltanet"],
    "flurka_softmax": [*[named("flurka+convolution")] * 3, named("softmax+convolution+gate")],
    "local_softmax": [*[named("local+convolution")] * 3, named("softmax+convolution+gate")],
}
"""Name -> model.attention, or those that layers have in turn.

What is around a mechanism is no gain of it: `local_around` is `flurka_best` without its far part, `softmax_around` sees
every token instead of landmarks; `local_convolution` and `softmax_convolution` are the same for `flurka_convolution`.
"""

FAR = 1024
"""First position of what is called far; windows and blocks are much shorter."""

NEAR = 256
"""Nearest tokens that stay true where what is further back is exchanged."""

HELD_OUT = 96 * 2048
"""Tokens that are measured, in sequences of a run's length."""

TASKS = {
    "by_position": "lm:samples={samples}",
    "shuffled": f"lm:far=shuffled,near={NEAR},samples={{samples}}",
    "text": "lm:repeated=text,samples={samples}",
    "random": "lm:repeated=random,samples={samples}",
}
"""What is measured -> `megakernel evaluate --task`."""


class Run(NamedTuple):
    """A model on sequences of one length."""

    model: str
    length: int
    seed: int
    tokens: int
    """Of training."""

    def overrides(self) -> list[str]:
        """What is laid over the configuration."""
        rows = load(CONFIG).training
        size = rows.seq_len * rows.global_batch_size
        form = MODELS[self.model]
        key = "attention_pattern" if isinstance(form, list) else "attention"
        return [
            f"run.name={self.model}-{self.length}-{self.seed}",
            f"run.seed={1234 + self.seed}",
            f"model.{key}={json.dumps(form)}",
            f"training.seq_len={self.length}",
            f"training.global_batch_size={size // self.length}",
            f"training.micro_batch_size={size // self.length}",
            f"training.steps={self.tokens // size}",
        ]

    def config(self) -> Config:
        """Its configuration."""
        return load(CONFIG, self.overrides())


class Measures(NamedTuple):
    """What held-out text says of a model; losses are nats per token."""

    loss: float
    near: float
    """Loss at positions below FAR."""

    far: float
    """Loss from FAR on."""

    gain: float
    """By how much the loss behind FAR is worse with another document's tokens before the nearest NEAR."""

    text: tuple[float, float]
    """Loss of held-out spans of half a sequence: read first, and again."""

    random: tuple[float, float]
    """The same of ids drawn at random."""

    @classmethod
    def of(cls, folder: Path, step: int, length: int) -> "Measures":
        """Of a run's checkpoint, on sequences of a length; what is measured already is read."""
        tasks = {name: task.format(samples=HELD_OUT // length) for name, task in TASKS.items()}
        found = {name: measured(folder, step, task) for name, task in tasks.items()}
        buckets, shuffled = found["by_position"]["by_position"], found["shuffled"]["buckets"]
        return cls(
            found["by_position"]["loss"],
            _mean([bucket for bucket in buckets if bucket["first"] < FAR], "loss"),
            _mean([bucket for bucket in buckets if bucket["first"] >= FAR], "loss"),
            _mean([bucket for bucket in shuffled if bucket["first"] >= FAR], "gain"),
            (found["text"]["first_loss"], found["text"]["second_loss"]),
            (found["random"]["first_loss"], found["random"]["second_loss"]),
        )

    def cells(self) -> list[str]:
        """Its part of a line, under COLUMNS."""
        pairs = [f"{first:.3f} → {second:.3f}" for first, second in (self.text, self.random)]
        return [f"{self.loss:.4f}", f"{self.near:.4f}", f"**{self.far:.4f}**", f"{self.gain:+.4f}", *pairs]


COLUMNS = ("loss", f"below {FAR:,}", f"from {FAR:,}", "far gain", "text again", "random again")

READING = (
    f"Losses are nats per token, over {HELD_OUT:,} held-out tokens. *Far gain*: by how much the loss of {NEAR} tokens "
    f"from positions {FAR:,}, {2 * FAR:,}, … on rises when all but the nearest {NEAR} to {2 * NEAR - 1} tokens are "
    "another document's. *Again*: half a sequence, read first and read again. *State*: numbers that decoding carries "
    "after N tokens."
)
"""How the columns are read."""


def state_of(model: Model, length: int) -> int:
    """Numbers that decoding carries after `length` tokens, over all layers."""
    shape = Shape(model.num_heads, model.kv_heads, model.head_size)
    sizes = [layer.state_sizes(shape) for layer in model.attentions]
    return sum(constant + added * length for constant, added in sizes)


class Outcome(NamedTuple):
    """The measures of a run."""

    run: Run
    measures: Measures
    speed: float
    """Tokens of training a second, in the middle."""

    def row(self) -> str:
        """Its line of the table."""
        run, state = self.run, state_of(self.run.config().model, self.run.length)
        return table_row(
            [
                f"`{run.model}`",
                f"{run.length:,}",
                run.seed,
                *self.measures.cells(),
                f"{state:,}",
                f"{self.speed:,.0f}",
            ]
        )


def prepare(data: Path) -> None:
    """The documents, tokenized; those of whole texts are held out."""
    if not data.exists():
        repositories.make(TEXT)
        source = str(TEXT / "documents.jsonl")
        megakernel("prepare", "--source", source, "--tokenizer", TOKENIZER, "--out", str(data))


def measure(run: Run) -> Outcome:
    """Train a model as far as is asked for and measure it, or read what is there."""
    folder = trained(CONFIG, run.overrides())
    found = Measures.of(folder, run.config().training.steps, run.length)
    return Outcome(run, found, statistics.median(curve(folder, "throughput/tokens_per_sec").values()))


def _mean(buckets: Sequence[dict[str, Any]], name: str) -> float:
    total: float = sum(bucket[name] * bucket["tokens"] for bucket in buckets)
    return total / sum(bucket["tokens"] for bucket in buckets)


def page(outcomes: Iterable[Outcome], tokens: int, command: str) -> str:
    """The table with what it was measured by, the lowest far loss of each length first."""
    outcomes = sorted(outcomes, key=lambda found: (found.run.length, found.measures.far))
    config = outcomes[0].run.config()
    model, training = config.model, config.training
    columns = ("model", "N", "seed", *COLUMNS, "state", "tokens/s")
    names = sorted({found.run.model for found in outcomes})
    written = [f"* `{name}`: `{json.dumps(MODELS[name])}`" for name in names]
    text = (
        f"{model.num_layers} layers x {model.hidden_size}, {model.num_heads} heads, `{TOKENIZER}`; {tokens:,} "
        f"tokens of `benchmarks.repositories` in steps of {training.global_batch_size * training.seq_len:,}, "
        f"{training.dtype}, learning rate {config.optimizer.lr:g}, constant behind "
        f"{config.schedule.warmup_steps} steps; the same sequences in the same order for all models of a seed. "
        f"{READING} Runs shared the machine: *tokens/s* of the training are medians, and say little."
    )
    lines = (found.row() for found in outcomes)
    return "\n".join(
        [one_table("What the far context is worth", command, text, columns, lines), *written, ""]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """0 once every model is measured and the page is written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument(
        "--lengths", nargs="+", type=int, choices=(2048, 4096, 8192), default=[2048], metavar="N"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="S")
    parser.add_argument(
        "--tokens", type=int, default=4_915_200, metavar="N", help="of training, of each model"
    )
    add_out(parser)
    given = sys.argv[1:] if argv is None else list(argv)
    arguments = parser.parse_args(given)
    prepare(load(CONFIG).data.train[0].path)
    outcomes = []
    for length in arguments.lengths:
        for seed in arguments.seeds:
            for model in arguments.only:
                outcomes.append(found := measure(Run(model, length, seed, arguments.tokens)))
                print(found.row(), flush=True)
    give(page(outcomes, arguments.tokens, typed("far_context", given)), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))

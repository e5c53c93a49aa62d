"""How much each mechanism gains from its far context: small models of equal size on long texts, at equal tokens.

    OMP_NUM_THREADS=1 python -m benchmarks.far_context --out benchmarks/results/far_context_cpu.md

Each model is trained by `megakernel pretrain benchmarks/far_context.yaml` on `benchmarks.repositories`, whose documents
are longer than any sequence, and measured by `megakernel evaluate`. The learning rate is constant, so that runs resume
when `--tokens` is raised. Runs are in runs/far_context; finished ones are read, not repeated.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import repositories
from benchmarks.page import command_line, page_parser, run_main, table_page, table_row, write_page
from benchmarks.training_runs import evaluate_task, metric_curve, preset_tree, run_megakernel, train_run
from megakernel.config import Config, Model, load
from megakernel.config.mechanisms import LayerShape

CONFIG = Path(__file__).with_suffix(".yaml")
TEXT = Path("data/repositories")
TOKENIZER = "bpe:8192"

SELECTED = [(unit, size) for unit in ("tile", "token") for size in (16, 32, 64)]
"""Unit and block size of the choosing layers; a quarter of 2,048 tokens is chosen."""


def selected(unit: str, size: int, *parts: str) -> dict[str, Any]:
    """`model.attention` of a layer that reads 512 tokens in blocks of `size`, and its own block and the one before."""
    tree = preset_tree("+".join(["selected", *parts]))
    chosen = {"blocks": 512 // size, "landmarks": 4, "unit": unit}
    return {**tree, "near": {"block_size": size, "blocks": 2}, "selection": chosen}


def selected_last(unit: str, size: int) -> list[dict[str, Any]]:
    """`model.attention_pattern`: three windows and a choosing layer."""
    return [*[preset_tree("local+convolution")] * 3, selected(unit, size, "convolution", "gate")]


MODELS: dict[str, Any] = {
    **{name: name for name in ("softmax", "linear", "gated_deltanet", "local", "flurka", "flurka_decay")},
    **{f"{name}_convolution": preset_tree(f"{name}+convolution") for name in ("softmax", "local", "flurka")},
    "flurka_gate": preset_tree("flurka+gate"),
    **{f"{name}_around": preset_tree(f"{name}+convolution+gate") for name in ("softmax", "local", "flurka")},
    "flurka_best": preset_tree("flurka_decay+convolution+gate"),
    "flurka_deltanet": [preset_tree("flurka+convolution"), "gated_deltanet"],
    "local_deltanet": [preset_tree("local+convolution"), "gated_deltanet"],
    "flurka_softmax": [*[preset_tree("flurka+convolution")] * 3, preset_tree("softmax+convolution+gate")],
    **{f"local_selected_{unit}_{size}": selected_last(unit, size) for unit, size in SELECTED},
    "local_softmax": [*[preset_tree("local+convolution")] * 3, preset_tree("softmax+convolution+gate")],
}
"""Name -> model.attention, or a list for model.attention_pattern.

Controls separate a mechanism from the parts around it: `local_around` is `flurka_best` without its far part,
`softmax_around` sees every token instead of landmarks; `local_convolution` and `softmax_convolution` are those of
`flurka_convolution`.
"""

FAR = 1024
"""First position counted as far; windows and blocks are much shorter."""

NEAR = 256
"""Nearest tokens that are kept when the tokens before them are replaced by another document's."""

HELD_OUT = 96 * 2048
"""Evaluated tokens, in sequences of a run's length."""

TASKS = {
    "by_position": "lm:samples={samples}",
    "shuffled": f"lm:far=shuffled,near={NEAR},samples={{samples}}",
    "text": "lm:repeated=text,samples={samples}",
    "random": "lm:repeated=random,samples={samples}",
}
"""Measurement -> `megakernel evaluate --task`."""


class Run(NamedTuple):
    """One model, trained on sequences of one length."""

    model: str
    length: int
    seed: int
    tokens: int
    """Training tokens."""

    def overrides(self) -> list[str]:
        """The overrides of CONFIG."""
        training = load(CONFIG).training
        step_tokens = training.seq_len * training.global_batch_size
        attention = MODELS[self.model]
        key = "attention_pattern" if isinstance(attention, list) else "attention"
        return [
            f"run.name={self.model}-{self.length}-{self.seed}",
            f"run.seed={1234 + self.seed}",
            f"model.{key}={json.dumps(attention)}",
            f"training.seq_len={self.length}",
            f"training.global_batch_size={step_tokens // self.length}",
            f"training.micro_batch_size={step_tokens // self.length}",
            f"training.steps={self.tokens // step_tokens}",
        ]

    def config(self) -> Config:
        """The run's configuration."""
        return load(CONFIG, self.overrides())


class Measures(NamedTuple):
    """Measurements on held-out text; losses are nats per token."""

    loss: float
    near: float
    """Loss at positions below FAR."""

    far: float
    """Loss from FAR on."""

    gain: float
    """Increase of the loss from FAR on when all but the nearest NEAR tokens are another document's."""

    text: tuple[float, float]
    """Loss of held-out spans of half a sequence: on first reading, and repeated."""

    random: tuple[float, float]
    """The same for random token ids."""

    @classmethod
    def of(cls, folder: Path, step: int, length: int) -> "Measures":
        """Measurements of a run's checkpoint on sequences of this length; existing ones are read."""
        tasks = {name: task.format(samples=HELD_OUT // length) for name, task in TASKS.items()}
        results = {name: evaluate_task(folder, step, task) for name, task in tasks.items()}
        buckets, shuffled = results["by_position"]["by_position"], results["shuffled"]["buckets"]
        return cls(
            results["by_position"]["loss"],
            _mean([bucket for bucket in buckets if bucket["first"] < FAR], "loss"),
            _mean([bucket for bucket in buckets if bucket["first"] >= FAR], "loss"),
            _mean([bucket for bucket in shuffled if bucket["first"] >= FAR], "gain"),
            (results["text"]["first_loss"], results["text"]["second_loss"]),
            (results["random"]["first_loss"], results["random"]["second_loss"]),
        )

    def cells(self) -> list[str]:
        """The table cells under COLUMNS."""
        pairs = [f"{first:.3f} → {second:.3f}" for first, second in (self.text, self.random)]
        return [f"{self.loss:.4f}", f"{self.near:.4f}", f"**{self.far:.4f}**", f"{self.gain:+.4f}", *pairs]


COLUMNS = ("loss", f"below {FAR:,}", f"from {FAR:,}", "far gain", "text again", "random again")

COLUMN_NOTES = (
    f"Losses are nats per token, over {HELD_OUT:,} held-out tokens. *Far gain*: by how much the loss of {NEAR} tokens "
    f"from positions {FAR:,}, {2 * FAR:,}, … on rises when all but the nearest {NEAR} to {2 * NEAR - 1} tokens are "
    "another document's. *Again*: loss of half a sequence, on first reading and repeated. *State*: numbers in the "
    "decoding state after N tokens."
)
"""Explanation of the columns."""


def state_size(model: Model, length: int) -> int:
    """Size of the decoding state after `length` tokens, in numbers, over all layers."""
    shape = LayerShape(model.num_heads, model.kv_heads, model.head_size)
    sizes = [layer.state_sizes(shape) for layer in model.attentions]
    return sum(constant + added * length for constant, added in sizes)


class RunResult(NamedTuple):
    """The measurements of a run."""

    run: Run
    measures: Measures
    speed: float
    """Median training tokens per second."""

    def row(self) -> str:
        """The table row."""
        run, state = self.run, state_size(self.run.config().model, self.run.length)
        sizes = (f"`{run.model}`", f"{run.length:,}", run.seed)
        return table_row([*sizes, *self.measures.cells(), f"{state:,}", f"{self.speed:,.0f}"])


def prepare(data: Path) -> None:
    """Fetch and tokenize the documents unless that is done; whole documents are held out."""
    if not data.exists():
        repositories.make_corpus(TEXT)
        source = str(TEXT / "documents.jsonl")
        run_megakernel("prepare", "--source", source, "--tokenizer", TOKENIZER, "--out", str(data))


def measure(run: Run) -> RunResult:
    """Train a model to its last step and measure it, unless that is done."""
    folder = train_run(CONFIG, run.overrides())
    measures = Measures.of(folder, run.config().training.steps, run.length)
    return RunResult(
        run, measures, statistics.median(metric_curve(folder, "throughput/tokens_per_sec").values())
    )


def _mean(buckets: Sequence[dict[str, Any]], name: str) -> float:
    total: float = sum(bucket[name] * bucket["tokens"] for bucket in buckets)
    return total / sum(bucket["tokens"] for bucket in buckets)


def page(results: Iterable[RunResult], tokens: int, command: str) -> str:
    """The page; rows are sorted by length, then by far loss."""
    results = sorted(results, key=lambda x: (x.run.length, x.measures.far))
    config = results[0].run.config()
    model, training = config.model, config.training
    columns = ("model", "N", "seed", *COLUMNS, "state", "tokens/s")
    names = sorted({result.run.model for result in results})
    models = [f"* `{name}`: `{json.dumps(MODELS[name])}`" for name in names]
    text = (
        f"{model.num_layers} layers x {model.hidden_size}, {model.num_heads} heads, `{TOKENIZER}`; {tokens:,} "
        f"tokens of `benchmarks.repositories` in steps of {training.global_batch_size * training.seq_len:,}, "
        f"{training.dtype}, learning rate {config.optimizer.lr:g}, constant after "
        f"{config.schedule.warmup_steps} steps; the same sequences in the same order for all models of a seed. "
        f"{COLUMN_NOTES} Runs shared the machine: *tokens/s*, medians of the training, are only indicative."
    )
    lines = (result.row() for result in results)
    return "\n".join(
        [table_page("What the far context is worth", command, text, columns, lines), *models, ""]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every model and write the page."""
    parser = page_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument(
        "--lengths", nargs="+", type=int, choices=(2048, 4096, 8192), default=[2048], metavar="N"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="S")
    parser.add_argument(
        "--tokens", type=int, default=4_915_200, metavar="N", help="training tokens of each model"
    )
    arguments = parser.parse_args(argv)
    prepare(load(CONFIG).data.train[0].path)
    results = []
    for length in arguments.lengths:
        for seed in arguments.seeds:
            for model in arguments.only:
                results.append(result := measure(Run(model, length, seed, arguments.tokens)))
                print(result.row(), flush=True)
    write_page(page(results, arguments.tokens, command_line("far_context", argv)), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))

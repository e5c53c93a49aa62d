"""Which mechanisms can recall: associative recall, or another synthetic task, trained on the answers alone.

    OMP_NUM_THREADS=1 python -m benchmarks.recall --out benchmarks/results/recall_cpu.md
    OMP_NUM_THREADS=1 python -m benchmarks.recall --task passkey:digits=2,length=64 --tokenizer bpe:1024 \
        training.seq_len=512 --out benchmarks/results/passkey_cpu.md

Each mechanism is trained by `megakernel pretrain configs/tasks/mqar.yaml` on examples from `megakernel prepare
--source task:NAME`, each seen once, and measured by `megakernel evaluate --task NAME` on others. `section.key=value` on
the command line overrides the configuration of all runs. With `--start PRESET` only that one is trained from random
weights, for `--start-steps`, and the others are up-trained from it. Runs are in runs/recall, examples in data/recall;
finished ones are read, not repeated.
"""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.page import command_line, page_parser, run_main, table_page, table_row, write_page
from benchmarks.training_runs import (
    evaluate_task,
    metric_curve,
    preset_tree,
    run_megakernel,
    train_run,
    uptrain_run,
    with_small_blocks,
)
from megakernel.config import Config, Training, load
from megakernel.evaluation.records import file_name

CONFIG = Path(__file__).parents[1] / "configs" / "tasks" / "mqar.yaml"
MECHANISMS = ("softmax", "linear", "performer", "generative_prf", "flurka_kernel", "flurka", "local")
"""Presets that are trained by default; `local` is `flurka`'s local window alone."""

HELD_OUT = 0.02
"""Share of the examples for validation during training."""

EXAMPLES = 512
"""Examples on which accuracy is measured."""

OTHER_EXAMPLES = 64
"""Evaluated examples of each length that is not trained on."""

TRANSFER = 50
"""Steps of attention transfer at the start of an up-training."""


@dataclass(frozen=True)
class Setup:
    """The task and the sizes that all mechanisms share."""

    task_spec: str
    """The task, such as `mqar:pairs=8`; without a length an example fills a sequence."""

    tokenizer: str
    """As `megakernel prepare --tokenizer` takes it."""

    block_size: int
    rank: int
    overrides: list[str]

    start: str | None = None
    """The preset that the others are up-trained from; None: all start from random weights."""

    start_steps: int = 0
    """Training steps of `start`."""

    def config(self, *more: str) -> Config:
        """The configuration of a run."""
        return load(CONFIG, [*self.common_overrides, *more])

    @property
    def common_overrides(self) -> list[str]:
        """Overrides of all runs."""
        return [f"data.train={self.data}", "run.root=runs/recall", *self.overrides]

    @property
    def training(self) -> Training:
        """The training section of all runs."""
        return load(CONFIG, self.overrides).training

    @property
    def task(self) -> str:
        """The value of `--task` and `--source task:`."""
        return self.task_spec if self._length else self.task_at(self.training.seq_len)

    def task_at(self, length: int) -> str:
        """The task with examples of this length."""
        if self._length:
            return re.sub(r"(?<=[:,]length=)\d+", str(length), self.task_spec)
        return f"{self.task_spec}{',' if ':' in self.task_spec else ':'}length={length}"

    @property
    def _length(self) -> int | None:
        match = re.search(r"[:,]length=(\d+)", self.task_spec)
        return int(match[1]) if match else None

    @property
    def num_examples(self) -> int:
        """Number of examples: so many that no step repeats one, the held-out ones, and a few to spare."""
        training, extra_steps = self.training, self.start_steps + TRANSFER if self.start else 0
        samples, tokens = (x * (1 + extra_steps / training.steps) for x in training.consumed(training.steps))
        examples = tokens / self._length if self._length else samples
        return int((examples + 1) / (1 - HELD_OUT) * 1.02) + 100

    @property
    def name(self) -> str:
        """Name of the examples' folder and prefix of the runs' names; it has their number, as longer runs read more."""
        return f"{file_name(self.task)}-{file_name(self.tokenizer)}-{self.num_examples}"

    @property
    def data(self) -> Path:
        """Folder of the examples."""
        return Path("data/recall") / self.name

    def overrides_of(self, preset: str, *more: str) -> list[str]:
        """Overrides of one mechanism's run."""
        names = [
            f"run.name={self.name}-{file_name(preset)}",
            f"model.attention={json.dumps(self.attention(preset))}",
        ]
        return [*self.common_overrides, *names, *more]

    def attention(self, preset: str) -> dict[str, Any]:
        """The preset with blocks small enough for short sequences."""
        return with_small_blocks(preset, self.block_size, self.rank, self.rank)


@dataclass(frozen=True)
class RecallResult:
    """The results of one mechanism."""

    mechanism: str
    losses: dict[int, float]
    """Step -> loss of held-out answers."""

    accuracy: float
    loss: float

    others: dict[int, float] = field(default_factory=dict)
    """Length that was not trained on -> accuracy."""

    transfer_accuracy: float | None = None
    """Accuracy of an up-training after attention transfer, before its main stage."""

    def row(self) -> str:
        """The table row."""
        losses = [f"{loss:.3f}" for loss in (*self.losses.values(), self.loss)]
        others = [f"{accuracy:.1%}" for accuracy in self.others.values()]
        accuracy_cell = f"**{self.accuracy:.1%}**"
        if self.transfer_accuracy is not None:
            accuracy_cell = f"{self.transfer_accuracy:.1%} → {accuracy_cell}"
        return table_row([f"`{self.mechanism}`", *losses, accuracy_cell, *others])


START_NOTE = (
    " `{setup.start}` has {setup.start_steps} steps from random weights; the others are up-trained from it by "
    "`megakernel uptrain`, {transfer} steps of attention transfer, after which the first share of right answers is "
    "measured, before the steps that train all weights."
)


def prepare(setup: Setup) -> None:
    """Make the examples that each run reads."""
    options = ["--tokenizer", setup.tokenizer, "--validation-fraction", str(HELD_OUT)]
    options += ["--max-documents", str(setup.num_examples), "--out", str(setup.data)]
    run_megakernel("prepare", "--source", f"task:{setup.task}", *options)


def train(setup: Setup, preset: str, others: Sequence[int]) -> RecallResult:
    """Train one mechanism and measure it, at other lengths too, unless that is done."""
    examples = ("--samples", str(EXAMPLES))
    losses, transfer_accuracy = {}, None
    if setup.start is None:
        folder, step = train_run(CONFIG, setup.overrides_of(preset)), setup.training.steps
        losses = metric_curve(folder, "eval/loss")
    elif preset == setup.start:
        folder, step = train_start(setup, preset), setup.start_steps
    else:
        stages = uptrain_from(setup, preset, train_start(setup, setup.start))
        if (transfer := stages / "1-transfer").exists():
            transfer_accuracy = evaluate_task(transfer, TRANSFER, setup.task, *examples)["accuracy"]
        [folder], step = stages.glob("*-main"), setup.training.steps
    evaluation = evaluate_task(folder, step, setup.task, *examples)
    longer = {
        n: evaluate_task(folder, step, setup.task_at(n), "--samples", str(OTHER_EXAMPLES))["accuracy"]
        for n in others
    }
    return RecallResult(preset, losses, evaluation["accuracy"], evaluation["loss"], longer, transfer_accuracy)


def train_start(setup: Setup, preset: str) -> Path:
    """The run folder of the model that the others are up-trained from."""
    return train_run(CONFIG, setup.overrides_of(preset, f"training.steps={setup.start_steps}"))


def uptrain_from(setup: Setup, preset: str, dense: Path) -> Path:
    """Up-train a run to a preset unless that is done; returns the folder with its stages."""
    read = setup.start_steps * setup.training.global_batch_size
    overrides = setup.overrides_of(
        preset,
        f"init={{from: {dense}, moments: {dense}}}",
        f"training.skip_samples=[[0, {read}]]",
        # A local window has no parameters of its own to learn by attention transfer.
        f"uptrain.transfer={{steps: {TRANSFER}, lr: 1e-2}}" if "flurka" in preset else "uptrain={}",
    )
    return uptrain_run(CONFIG, overrides)[0]


def page(setup: Setup, results: Iterable[RecallResult], command: str) -> str:
    """The page; the most accurate mechanism comes first."""
    results = sorted(results, key=lambda result: -result.accuracy)
    config = setup.config()
    training, model = config.training, config.model
    steps = list(results[0].losses)
    columns = [
        "preset",
        *(f"loss, step {step}" for step in steps),
        "loss of answers",
        "answers right",
        *(f"at {length:,} tokens" for length in results[0].others),
    ]
    text = (
        f"`{setup.task}` ([what that is](../../docs/evaluation.md#synthetic-tasks)), tokenizer "
        f"`{setup.tokenizer}`. {model.num_layers} layers x {model.hidden_size}, {model.num_heads} heads, "
        f"{training.steps} steps of {training.global_batch_size} sequences of {training.seq_len} tokens, "
        f"{training.dtype}, learning rate {config.optimizer.lr:g}, one seed. FLuRKA has blocks of "
        f"{setup.block_size} tokens with {setup.rank} landmarks each. Losses, in nats, count only answers. Losses by "
        f"step are of held-out examples; the loss of answers and the share of right answers are of {EXAMPLES} others, "
        f"at other lengths of {OTHER_EXAMPLES}."
    )
    if setup.start:
        text += START_NOTE.format(setup=setup, transfer=TRANSFER)
    title = f"{setup.task_spec.partition(':')[0]} by mechanism"
    return table_page(title, command, text, columns, (result.row() for result in results))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every mechanism and write the page."""
    parser = page_parser(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of mqar.yaml")
    parser.add_argument("--only", nargs="+", default=MECHANISMS, metavar="PRESET[+PART]")
    parser.add_argument("--task", default="mqar:pairs=8", metavar="NAME[:key=value,...]")
    parser.add_argument("--tokenizer", default="byte", metavar="SPEC", help="byte, bpe:SIZE or words")
    parser.add_argument(
        "--also", nargs="+", type=int, default=[], metavar="N", help="more lengths to measure"
    )
    parser.add_argument("--start", metavar="PRESET[+PART]", help="up-train the others from it")
    parser.add_argument("--start-steps", type=int, default=500, metavar="N", help="steps of --start")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rank", type=int, default=4)
    arguments = parser.parse_intermixed_args(argv)
    for name in arguments.only:
        try:
            preset_tree(name)
        except ValueError as unknown:
            parser.error(f"argument --only: {unknown}")
    if arguments.start is not None and arguments.start not in arguments.only:
        arguments.only.insert(0, arguments.start)
    sizes = (arguments.block_size, arguments.rank)
    start = (arguments.start, arguments.start_steps)
    setup = Setup(arguments.task, arguments.tokenizer, *sizes, arguments.overrides, *start)
    prepare(setup)
    results = []
    for preset in arguments.only:
        results.append(result := train(setup, preset, arguments.also))
        print(result.row(), flush=True)
    write_page(page(setup, results, command_line("recall", argv)), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))

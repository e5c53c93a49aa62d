"""Which mechanisms find again what is asked for: associative recall, or another task, trained on answers alone.

    OMP_NUM_THREADS=1 python -m benchmarks.recall --out benchmarks/results/recall_cpu.md
    OMP_NUM_THREADS=1 python -m benchmarks.recall --task passkey:digits=2,length=64 --tokenizer bpe:1024 \
        training.seq_len=512 --out benchmarks/results/passkey_cpu.md

Each mechanism is trained by `megakernel pretrain configs/tasks/mqar.yaml` on examples that `megakernel prepare
--source task:NAME` makes, each seen once, and measured by `megakernel evaluate --task NAME` on others. What is
`section.key=value` on the command line is laid over the configuration of all of them. With `--start MODEL` that one
alone is trained from random weights, for `--start-steps`, and each mechanism is up-trained from it. Runs lie in
runs/recall, examples in data/recall; what is done is read, not repeated.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.page import add_out, ended, give, one_table, table_row, typed
from benchmarks.trained import curve, in_blocks, measured, megakernel, named, trained, uptrained
from megakernel.config import Config, Training, load
from megakernel.evaluation.records import file_name

CONFIG = Path(__file__).parents[1] / "configs" / "tasks" / "mqar.yaml"
MECHANISMS = ("softmax", "linear", "performer", "generative_prf", "flurka_kernel", "flurka", "local")
"""The presets that are trained by default; `local` is the near window of `flurka` by itself."""

HELD_OUT = 0.02
"""Share of the examples for the losses during training."""

EXAMPLES = 512
"""Examples on which accuracy is measured."""

OTHER_EXAMPLES = 64
"""Examples of each length that is not trained on."""

TRANSFER = 50
"""Steps of attention transfer that an up-training begins with."""


@dataclass(frozen=True)
class Plan:
    """The task and the sizes that all mechanisms have in common."""

    of: str
    """The task: `mqar:pairs=8`; without a length an example fills a sequence."""

    tokenizer: str
    """As `megakernel prepare --tokenizer` takes it."""

    block_size: int
    rank: int
    overrides: list[str]

    start: str | None = None
    """What the mechanisms are up-trained from; None: they begin with random weights."""

    start_steps: int = 0
    """Steps of that."""

    def config(self, *more: str) -> Config:
        """The configuration of a run."""
        return load(CONFIG, [*self.everywhere, *more])

    @property
    def everywhere(self) -> list[str]:
        """What is laid over the configuration of all runs."""
        return [f"data.train={self.data}", "run.root=runs/recall", *self.overrides]

    @property
    def training(self) -> Training:
        """The training section of all runs."""
        return load(CONFIG, self.overrides).training

    @property
    def task(self) -> str:
        """The value of `--task` and `--source task:`."""
        return self.of if self._length else self.at(self.training.seq_len)

    def at(self, length: int) -> str:
        """The task with examples of this length."""
        if self._length:
            return re.sub(r"(?<=[:,]length=)\d+", str(length), self.of)
        return f"{self.of}{',' if ':' in self.of else ':'}length={length}"

    @property
    def _length(self) -> int | None:
        given = re.search(r"[:,]length=(\d+)", self.of)
        return int(given[1]) if given else None

    @property
    def documents(self) -> int:
        """Examples: those of all steps, each read once, those that are held out, and a few to spare."""
        training, before = self.training, self.start_steps + TRANSFER if self.start else 0
        samples, tokens = (x * (1 + before / training.steps) for x in training.consumed(training.steps))
        examples = tokens / self._length if self._length else samples
        return int((examples + 1) / (1 - HELD_OUT) * 1.02) + 100

    @property
    def name(self) -> str:
        """Name of the examples and prefix of the runs' names: runs of other lengths read other examples."""
        return f"{file_name(self.task)}-{file_name(self.tokenizer)}-{self.documents}"

    @property
    def data(self) -> Path:
        """Folder of the examples."""
        return Path("data/recall") / self.name

    def laid_over(self, preset: str, *more: str) -> list[str]:
        """What is laid over the configuration of one mechanism's run."""
        names = [
            f"run.name={self.name}-{file_name(preset)}",
            f"model.attention={json.dumps(self.attention(preset))}",
        ]
        return [*self.everywhere, *names, *more]

    def attention(self, preset: str) -> dict[str, Any]:
        """The preset with blocks that a short sequence has several of."""
        return in_blocks(preset, self.block_size, self.rank, self.rank)


@dataclass(frozen=True)
class Outcome:
    """The results of one mechanism."""

    mechanism: str
    losses: dict[int, float]
    """Step -> loss of held-out answers."""

    accuracy: float
    loss: float

    others: dict[int, float] = field(default_factory=dict)
    """Length that was not trained on -> accuracy."""

    transferred: float | None = None
    """Of an up-training: accuracy after attention transfer, before anything else was trained."""

    def row(self) -> str:
        """Its line of the table."""
        losses = [f"{loss:.3f}" for loss in (*self.losses.values(), self.loss)]
        others = [f"{accuracy:.1%}" for accuracy in self.others.values()]
        own = f"**{self.accuracy:.1%}**"
        if self.transferred is not None:
            own = f"{self.transferred:.1%} → {own}"
        return table_row([f"`{self.mechanism}`", *losses, own, *others])


STARTED = (
    " `{plan.start}` has {plan.start_steps} steps from random weights; the others are up-trained from it by "
    "`megakernel uptrain`, {transfer} steps of attention transfer (the first share of right answers) before those "
    "of all weights."
)


def prepare(plan: Plan) -> None:
    """The examples that one run reads, each once."""
    options = ["--tokenizer", plan.tokenizer, "--validation-fraction", str(HELD_OUT), "--out", str(plan.data)]
    megakernel("prepare", "--source", f"task:{plan.task}", "--max-documents", str(plan.documents), *options)


def train(plan: Plan, preset: str, others: Sequence[int]) -> Outcome:
    """Train and measure one mechanism, at other lengths too, or read what is there."""
    examples = ("--samples", str(EXAMPLES))
    losses, before = {}, None
    if plan.start is None:
        folder, step = trained(CONFIG, plan.laid_over(preset)), plan.training.steps
        losses = curve(folder, "eval/loss")
    elif preset == plan.start:
        folder, step = started(plan, preset), plan.start_steps
    else:
        stages = continued(plan, preset, started(plan, plan.start))
        if (transfer := stages / "1-transfer").exists():
            before = measured(transfer, TRANSFER, plan.task, *examples)["accuracy"]
        [folder], step = stages.glob("*-main"), plan.training.steps
    found = measured(folder, step, plan.task, *examples)
    longer = {
        n: measured(folder, step, plan.at(n), "--samples", str(OTHER_EXAMPLES))["accuracy"] for n in others
    }
    return Outcome(preset, losses, found["accuracy"], found["loss"], longer, before)


def started(plan: Plan, preset: str) -> Path:
    """The folder of what the others start from."""
    return trained(CONFIG, plan.laid_over(preset, f"training.steps={plan.start_steps}"))


def continued(plan: Plan, preset: str, dense: Path) -> Path:
    """The folder of an up-training from a run, made where it is not there."""
    read = plan.start_steps * plan.training.global_batch_size
    overrides = plan.laid_over(
        preset,
        f"init={{from: {dense}, moments: {dense}}}",
        f"training.skip_samples=[[0, {read}]]",
        # A window has nothing to learn apart.
        f"uptrain.transfer={{steps: {TRANSFER}, lr: 1e-2}}" if "flurka" in preset else "uptrain={}",
    )
    return uptrained(CONFIG, overrides)[0]


def page(plan: Plan, outcomes: Iterable[Outcome], command: str) -> str:
    """The table with what it was measured by, the most accurate first."""
    outcomes = sorted(outcomes, key=lambda found: -found.accuracy)
    config = plan.config()
    training, model = config.training, config.model
    steps = list(outcomes[0].losses)
    columns = [
        "preset",
        *(f"loss, step {step}" for step in steps),
        "loss of answers",
        "answers right",
        *(f"at {length:,} tokens" for length in outcomes[0].others),
    ]
    text = (
        f"`{plan.task}` ([what that is](../../docs/evaluation.md#synthetic-tasks)), tokenizer "
        f"`{plan.tokenizer}`. {model.num_layers} layers x {model.hidden_size}, {model.num_heads} heads, "
        f"{training.steps} steps of {training.global_batch_size} sequences of {training.seq_len} tokens, "
        f"{training.dtype}, learning rate {config.optimizer.lr:g}, one seed. FLuRKA has blocks of "
        f"{plan.block_size} tokens with {plan.rank} landmarks each. The loss, in nats, counts "
        f"answers alone. Losses by step are of held-out examples, the last ones and the "
        f"share of right answers of {EXAMPLES} others, at other lengths of {OTHER_EXAMPLES}."
    )
    if plan.start:
        text += STARTED.format(plan=plan, transfer=TRANSFER)
    title = f"{plan.of.partition(':')[0]} by mechanism"
    return one_table(title, command, text, columns, (found.row() for found in outcomes))


def main(argv: Sequence[str] | None = None) -> int:
    """0 once every mechanism is measured and the page is written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="over configs/tasks/mqar.yaml"
    )
    parser.add_argument("--only", nargs="+", default=MECHANISMS, metavar="PRESET[+PART]")
    parser.add_argument("--task", default="mqar:pairs=8", metavar="NAME[:key=value,...]")
    parser.add_argument("--tokenizer", default="byte", metavar="SPEC", help="byte, bpe:SIZE or words")
    parser.add_argument(
        "--also", nargs="+", type=int, default=[], metavar="N", help="other lengths to measure"
    )
    parser.add_argument("--start", metavar="PRESET[+PART]", help="up-train the others from it")
    parser.add_argument("--start-steps", type=int, default=500, metavar="N", help="steps of that")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rank", type=int, default=4)
    add_out(parser)
    given = sys.argv[1:] if argv is None else list(argv)
    arguments = parser.parse_intermixed_args(given)
    for name in arguments.only:
        try:
            named(name)
        except ValueError as unknown:
            parser.error(f"argument --only: {unknown}")
    if arguments.start is not None and arguments.start not in arguments.only:
        arguments.only.insert(0, arguments.start)
    plan = Plan(
        arguments.task,
        arguments.tokenizer,
        arguments.block_size,
        arguments.rank,
        arguments.overrides,
        arguments.start,
        arguments.start_steps,
    )
    prepare(plan)
    outcomes = []
    for preset in arguments.only:
        outcomes.append(found := train(plan, preset, arguments.also))
        print(found.row(), flush=True)
    give(page(plan, outcomes, typed("recall", given)), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))

"""Time and memory per token as sequences grow to 1,048,576 tokens, on two CPU processes.

    megakernel prepare --source stdlib --tokenizer byte --out data/stdlib
    OMP_NUM_THREADS=1 python -m benchmarks.long_sequences --out benchmarks/results/long_sequences_cpu.md

Trains `configs/million_token_cpu.yaml` unchanged, and a few steps of the same model on shorter sequences. Each run's
numbers come from its metrics.jsonl. Memory per token is what a run takes beyond a run on sequences of 2,048 tokens,
which stands for libraries and weights. No page is written unless the loss of the longest sequences fell.
"""

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.page import command_line, docstring_parser, page_header, run_main, table, write_page
from benchmarks.training_runs import RETURN_FREED_MEMORY, metric_curve, run_megakernel
from megakernel.config import load

CONFIG = Path("configs/million_token_cpu.yaml")
BASE_TOKENS = 2_048
LENGTHS = (131_072, 262_144, 524_288)
STEPS = 3
WARMUP_STEPS = 1
"""Warm-up steps, whose times do not count: memory pages are touched for the first time."""

TARGET_RATIO = 1.15
"""Target for the largest cost of a token over the smallest."""

TARGET_GIB = 8.0
"""Target for the memory of all processes together."""


class LengthResult(NamedTuple):
    """Results of one sequence length."""

    tokens: int
    seconds: float
    """Median time of a step."""

    peak: float
    """Largest peak memory of a process, in GiB."""

    losses: list[float]


def measure_length(tokens: int, steps: int, processes: int, overrides: Sequence[str]) -> LengthResult:
    """Train `steps` steps on sequences of `tokens`, unless that is done."""
    name = f"long_sequences-{tokens}"
    keys = [f"run.name={name}", f"training.seq_len={tokens}", f"training.steps={steps}", *overrides]
    os.environ |= RETURN_FREED_MEMORY
    run_megakernel("pretrain", str(CONFIG), "--nproc", str(processes), *keys)
    folder = load(CONFIG, keys).run.folder
    tags = ("throughput/step_time", "memory/peak_gib", "train/loss")
    times, peaks, losses = (list(metric_curve(folder, tag).values()) for tag in tags)
    return LengthResult(tokens, statistics.median(times[WARMUP_STEPS:]), max(peaks), losses)


def page(rows: Sequence[LengthResult], base: LengthResult, processes: int, command: str) -> str:
    """The page: explanation, table, and how its numbers compare with the targets."""
    longest, config = rows[-1], load(CONFIG)
    model, training = config.model, config.training
    per_token = [row.seconds / row.tokens * 1e6 for row in rows]
    bytes_per_token = [(row.peak - base.peak) * processes * 2**30 / row.tokens for row in rows]
    lines = [
        *page_header(
            "Long sequences on a CPU",
            command,
            f" in each of {processes} processes (`parallel.context: {processes}`)",
        ),
        f"`{CONFIG}`: {model.num_layers} layers × {model.hidden_size}, {model.num_heads} heads, FLuRKA, "
        f"{training.dtype}, one sequence of {longest.tokens:,} bytes of Python source per step at the longest. Times "
        f"are medians of the steps after the first {WARMUP_STEPS}. Memory is the largest peak of a process times "
        f"{processes}; libraries and weights take {base.peak * processes:.2f} GiB of it (sequences of {base.tokens:,} "
        "tokens), and memory per token is the rest.",
        "",
    ]
    lines += table(
        ("tokens of a sequence", "step, s", "µs per token", "peak of both, GiB", "bytes per token"),
        (
            f"| {row.tokens:,} | {row.seconds:.1f} | {micro:.1f} | {row.peak * processes:.2f} | {size:,.0f} |"
            for row, micro, size in zip(rows, per_token, bytes_per_token)
        ),
    )
    times, memory = max(per_token) / min(per_token), max(bytes_per_token) / min(bytes_per_token)
    lines += [
        f"The most expensive token costs {times:.2f}x the cheapest in time and {memory:.2f}x in memory "
        f"(target: at most {TARGET_RATIO:.2f}x each); the longest sequences take {longest.peak * processes:.2f} GiB "
        f"(target: at most {TARGET_GIB:.0f} GiB).",
        "",
        f"Loss of the steps of {longest.tokens:,} tokens, nats per byte: "
        + ", ".join(f"{loss:.3f}" for loss in longest.losses)
        + ".",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure and write the page."""
    parser = docstring_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/long_sequences_cpu.md"))
    parser.add_argument("overrides", nargs="*", help="section.key=value, as data.train=DIR")
    options = parser.parse_args()
    config = load(CONFIG, options.overrides)
    processes = config.parallel.context
    base = measure_length(BASE_TOKENS, STEPS, processes, options.overrides)
    rows = [measure_length(tokens, STEPS, processes, options.overrides) for tokens in LENGTHS]
    rows.append(measure_length(config.training.seq_len, config.training.steps, processes, options.overrides))
    losses = rows[-1].losses
    if not losses[-1] < losses[0]:
        raise SystemExit(f"the loss did not fall: {losses}; no page is written")
    write_page(page(rows, base, processes, command_line("long_sequences")), options.out)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))

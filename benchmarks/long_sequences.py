"""What a step costs per token as sequences grow to 1,048,576 tokens, on two CPU processes.

    megakernel prepare --source stdlib --tokenizer byte --out data/stdlib
    OMP_NUM_THREADS=1 python -m benchmarks.long_sequences --out benchmarks/results/long_sequences_cpu.md

Trains `configs/million_token_cpu.yaml` as it stands, and a few steps of the same model at shorter sequences. Each run's
numbers come from its metrics.jsonl. What the processes hold before any token (libraries and weights) is measured by a
run on sequences of 2,048 tokens, and memory per token is what a run takes beyond that. No page is written unless the
loss of the longest sequences fell.
"""

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.page import give, opening, table
from benchmarks.trained import RETURNS_MEMORY, curve, megakernel
from megakernel.config import load

CONFIG = Path("configs/million_token_cpu.yaml")
BASE = 2_048
LENGTHS = (131_072, 262_144, 524_288)
STEPS = 3
WARM = 1
"""Steps whose times do not count: pages are touched for the first time."""

ALLOWED = 1.15
"""How much dearer than the cheapest a token may be."""

LIMIT_GIB = 8.0
"""Memory limit of both processes together."""


class Row(NamedTuple):
    """One length."""

    tokens: int
    seconds: float
    """Median time of a step."""

    peak: float
    """GiB of the process that takes most."""

    losses: list[float]


def trained(tokens: int, steps: int, processes: int, overrides: Sequence[str]) -> Row:
    """Train `steps` steps of sequences of `tokens`, or read what was trained."""
    name = f"long_sequences-{tokens}"
    keys = [f"run.name={name}", f"training.seq_len={tokens}", f"training.steps={steps}", *overrides]
    # Short sequences have less for a validation sample to fill, and nothing here needs one.
    os.environ |= RETURNS_MEMORY
    megakernel("pretrain", str(CONFIG), "--nproc", str(processes), *keys)
    folder = load(CONFIG, keys).run.folder
    tags = ("throughput/step_time", "memory/peak_gib", "train/loss")
    times, peaks, losses = (list(curve(folder, tag).values()) for tag in tags)
    return Row(tokens, statistics.median(times[WARM:]), max(peaks), losses)


def page(rows: Sequence[Row], base: Row, processes: int, command: str) -> str:
    """The table and what it says."""
    longest, config = rows[-1], load(CONFIG)
    model, training = config.model, config.training
    per_token = [row.seconds / row.tokens * 1e6 for row in rows]
    bytes_per_token = [(row.peak - base.peak) * processes * 2**30 / row.tokens for row in rows]
    lines = [
        *opening(
            "Long sequences on a CPU",
            command,
            f" in each of {processes} processes (`parallel.context: {processes}`)",
        ),
        f"`{CONFIG}`: {model.num_layers} layers × {model.hidden_size}, {model.num_heads} heads, FLuRKA, "
        f"{training.dtype}, one sequence of {longest.tokens:,} bytes of Python source per step at the longest. Times "
        f"are medians of the steps behind the first {WARM}. Memory is the peak of the process that takes most, "
        f"times {processes}; before any token both together hold "
        f"{base.peak * processes:.2f} GiB (sequences of {base.tokens:,} tokens); memory per token is the rest.",
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
        f"The dearest token costs {times:.2f}x the cheapest in time and {memory:.2f}x in memory "
        f"(asked for: at most {ALLOWED:.2f}x each); the longest sequences take {longest.peak * processes:.2f} GiB "
        f"(asked for: at most {LIMIT_GIB:.0f} GiB).",
        "",
        f"Loss of the steps of {longest.tokens:,} tokens, nats per byte: "
        + ", ".join(f"{loss:.3f}" for loss in longest.losses)
        + ".",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/long_sequences_cpu.md"))
    parser.add_argument("overrides", nargs="*", help="section.key=value, as data.train=DIR")
    options = parser.parse_args()
    config = load(CONFIG, options.overrides)
    processes = config.parallel.context
    base = trained(BASE, STEPS, processes, options.overrides)
    rows = [trained(tokens, STEPS, processes, options.overrides) for tokens in LENGTHS]
    rows.append(trained(config.training.seq_len, config.training.steps, processes, options.overrides))
    losses = rows[-1].losses
    if not losses[-1] < losses[0]:
        raise SystemExit(f"the loss did not fall: {losses}; no page is written")
    give(page(rows, base, processes, "OMP_NUM_THREADS=1 python -m benchmarks.long_sequences"), options.out)
    print(options.out)


if __name__ == "__main__":
    main()

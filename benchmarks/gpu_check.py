"""The first half hour on a GPU: are the kernels right, how fast are they, and how fast does a model train.

    python -m benchmarks.gpu_check correctness
    python -m benchmarks.gpu_check speed
    python -m benchmarks.gpu_check training

`make gpu-check` runs the three, each of which takes at most 9 minutes: programs run one after another, and what is not
done by then is cut off. `benchmarks/results/gpu_PART.md` is written behind every program, with the last lines of each.
`python -m benchmarks.gpu_check call` is one FLuRKA layer forward and backward, and one token, for tools that watch it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.page import give, opening, table, table_row, whole_help
from benchmarks.trained import named
from megakernel.evaluation.records import file_name

SECONDS = 530.0
"""Time limit of a part: 9 minutes, less the time to start and to write."""

GRACE = 10.0
"""Seconds between asking a program to end and ending it."""

LINES = 200
"""Last lines of a program that the page shows."""

RUNS = Path("runs/gpu-check")
"""Runs of models, which are removed behind their program: what they tell is in its lines."""

RESULTS = Path(__file__).parent / "results"
PYTHON = sys.executable
CLI = (PYTHON, "-m", "launch.cli")


class Check(NamedTuple):
    """A program to run."""

    title: str
    command: tuple[str, ...]


class Outcome(NamedTuple):
    """The result of a program."""

    check: Check
    result: str
    seconds: float
    output: str

    @property
    def failed(self) -> bool:
        """Whether it ran and said no; what is not installed, or was cut off, did not."""
        return self.result.startswith("failed")


def run(check: Check, seconds: float) -> Outcome:
    """Run a program for at most so many seconds, and end it and what it started."""
    if shutil.which(check.command[0]) is None:
        return Outcome(check, "not installed", 0.0, "")
    if seconds <= 0:
        return Outcome(check, "no time left", 0.0, "")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            check.command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(seconds)
            result = "passed" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            result = "cut off"
        finally:
            _end(process)
            shutil.rmtree(RUNS, ignore_errors=True)
        log.seek(0)
        last = log.read().splitlines()[-LINES:]
    return Outcome(check, result, time.monotonic() - start, "\n".join(last))


def _end(process: subprocess.Popen) -> None:
    """End the session of a program."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run_all(part: str, checks: Sequence[Check], seconds: float, out: Path) -> list[Outcome]:
    """Run programs for at most so many seconds together, and write the page behind each."""
    end = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    for check in checks:
        outcomes.append(run(check, end - time.monotonic()))
        print(f"{outcomes[-1].result:>12}  {check.title}", flush=True)
        give(page(part, outcomes, len(checks)), out)
    return outcomes


def page(part: str, outcomes: Sequence[Outcome], total: int) -> str:
    """The text of the part's page."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    lines = opening(f"First check on a GPU: {part}", f"python -m benchmarks.gpu_check {part}", gpu)
    lines += [f"{len(outcomes)} of {total} programs.", ""]
    rows = (table_row([one.check.title, one.result, f"{one.seconds:.0f}"]) for one in outcomes)
    lines += table(("program", "result", "s"), rows)
    for one in outcomes:
        lines += [f"## {one.check.title}", "", f"`{' '.join(one.check.command)}`", ""]
        lines += [*(f"    {line}" for line in one.output.splitlines()), ""]
    return "\n".join(lines)


def _tests(title: str, *files: str) -> Check:
    paths = (f"tests/kernels/test_{file}.py" for file in files)
    return Check(title, (PYTHON, "-m", "pytest", "-q", "-n", "8", "-m", "not second", *paths))


def _bench(tokens: int, *more: str) -> Check:
    """Cases of at most so many tokens."""
    command = (*CLI, "dev", "bench", "attention", "--suite", "default", "--max-tokens", str(tokens), *more)
    return Check(
        f"attention, {tokens:,} tokens", (*command, "--out", str(RESULTS / f"gpu_attention_{tokens}.md"))
    )


def _pretrain(size: str, mechanism: str, seq_len: int) -> Check:
    """A few steps of a shape that is trained, on one GPU and on text that every machine has."""
    keys = {
        "run.root": RUNS,
        "run.name": f"{size}-{file_name(mechanism)}-{seq_len}",
        "data.train": "data/stdlib",
        "model.attention": json.dumps(named(mechanism)),
        "parallel.context": 1,
        "training.seq_len": seq_len,
        "training.steps": 12,
        "training.micro_batch_size": 1,
        "training.global_batch_size": 4,
        "training.log_every": 1,
        "schedule.warmup_steps": 2,
    }
    overrides = (f"{key}={value}" for key, value in keys.items())
    command = (*CLI, "pretrain", f"configs/pretrain-{size}.yaml", "--nproc", "1")
    return Check(f"{size}, {mechanism}, sequences of {seq_len:,}", (*command, *overrides))


CALL = (PYTHON, "-m", "benchmarks.gpu_check", "call")

NCU = (
    *("--section", "SpeedOfLight", "--section", "WarpStateStats"),
    *("--kernel-name", "regex:pool|write|join|window|bwd|step"),
)
"""The sections that ncu measures, of FLuRKA's kernels."""

PARTS = {
    "correctness": (
        _tests("decoding", "decode", "flurka_decode"),
        _tests("FLuRKA", "flurka_attention", "flurka_wrapped"),
        _tests("kernel attention", "kernel_attention", "scales"),
        _tests("states that decay, short convolution", "simple_gla", "gated_delta_rule", "short_convolution"),
        _tests("the other ops", "packed_softmax", "weighted_attention", "fastfood", "low_rank"),
        *(
            Check(
                f"compute-sanitizer {tool}",
                ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *CALL),
            )
            for tool in ("memcheck", "racecheck")
        ),
    ),
    "speed": (
        _bench(2**14, "--repeats", "10"),
        Check("ncu", ("ncu", *NCU, *CALL)),
        _bench(2**16, "--repeats", "10"),
    ),
    "training": (
        Check("text", (*CLI, "prepare", "--source", "stdlib", "--tokenizer", "byte", "--out", "data/stdlib")),
        _pretrain("350m", "flurka+convolution", 8192),
        _pretrain("350m", "softmax", 8192),
        _bench(2**20, "--repeats", "3", "--only", "kernel elu", "--only", "FLuRKA", "--only", "fla chunk"),
        _pretrain("350m", "flurka+convolution", 32_768),
        _pretrain("350m", "softmax", 32_768),
        _pretrain("1b", "flurka+convolution", 8192),
        _pretrain("1b", "softmax", 8192),
    ),
}
"""Part -> what it runs, the most telling first."""


def call(device: str = "cuda", length: int = 1000) -> torch.Tensor:
    """The output of one token behind a sequence that a FLuRKA layer has gone through forward and backward."""
    from megakernel import attention

    layer = attention.build("flurka", num_heads=4, num_kv_heads=2, head_dim=64).to(device)
    q, k, v = (
        torch.randn(2, heads, length, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    rotary = attention.Rotary(64)
    out = layer(q, k, v, attention.AttentionInputs(rotary=rotary))
    out.backward(torch.randn_like(out))
    with torch.no_grad():
        _, state = layer.extend(q, k, v, rotary=rotary)
        out, _ = layer.extend(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], state, rotary=rotary)
    return out.cpu()


def main() -> int:
    """Run a part; 1 where a program has failed."""
    parser = whole_help(__doc__)
    parser.add_argument("part", choices=(*PARTS, "call"))
    part = parser.parse_args().part
    if not torch.cuda.is_available():
        print("gpu_check: no GPU is here; run it where `nvidia-smi` lists one", file=sys.stderr)
        return 2
    if part == "call":
        call()
        return 0
    # An outer limit ends the program that runs, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    outcomes = run_all(part, PARTS[part], SECONDS, RESULTS / f"gpu_{part}.md")
    return 1 if any(one.failed for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())

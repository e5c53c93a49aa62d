"""The first half hour on a GPU: where a training step's time goes, are the kernels correct, how fast is everything.

    python -m benchmarks.gpu_check profile
    python -m benchmarks.gpu_check correctness
    python -m benchmarks.gpu_check speed
    python -m benchmarks.gpu_check training

`make gpu-check` runs the four parts, each of at most 9 minutes: programs run one after another and are cut off at the
limit. `benchmarks/results/gpu_PART.md` is written after every program and has the last lines of each. `profile` also
writes a page for each model, `gpu_step_MODEL.md`: a measured step beside its counted budget, the shipped FLuRKA first.

Without a GPU, `python -m benchmarks.gpu_check profile --dry-run` goes the same way with small models on the CPU. For
profilers and sanitizers, `python -m benchmarks.gpu_check call` is one FLuRKA layer forward and backward, and one
decoded token.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.kernels.step import summary
from benchmarks.page import docstring_parser, page_header, table, table_row, write_page
from benchmarks.training_runs import VOCAB_SIZE, preset_tree
from megakernel.evaluation.records import file_name

PART_SECONDS = 510.0
"""Time limit of a part: 9 minutes, less the time to start and to write."""

GRACE = 10.0
"""Seconds between the signals that end a program: SIGINT, after which pytest lists failures, SIGTERM and SIGKILL."""

OUTPUT_LINES = 200
"""Last lines of a program's output that the page shows."""

RUNS = Path("runs/gpu-check")
"""Folder of training runs, removed after each program: its output has the results."""

RESULTS = Path(__file__).parent / "results"

DRY_RUN = Path("runs/gpu-check-dry-run")
"""Folder of the pages of a dry run, whose times say nothing."""

MICRO_BATCH_TOKENS = 32_768
PYTHON = sys.executable
CLI = (PYTHON, "-m", "launch.cli")


class Check(NamedTuple):
    """A program to run."""

    title: str
    command: tuple[str, ...]


class CheckResult(NamedTuple):
    """The result of a program."""

    check: Check
    status: str
    seconds: float
    output: str

    @property
    def failed(self) -> bool:
        """Whether it ran and failed; a program that is not installed or was cut off did not fail."""
        return self.status.startswith("failed")


def run(check: Check, seconds: float) -> CheckResult:
    """Run a program for at most this many seconds, then end it and its children."""
    if shutil.which(check.command[0]) is None:
        return CheckResult(check, "not installed", 0.0, "")
    if seconds <= 0:
        return CheckResult(check, "no time left", 0.0, "")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    start = time.monotonic()
    with ExitStack() as until_end:
        until_end.callback(shutil.rmtree, RUNS, ignore_errors=True)
        log = until_end.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        process = subprocess.Popen(
            check.command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            exit_status = process.wait(seconds)
            status = "passed" if exit_status == 0 else f"failed with status {exit_status}"
        except subprocess.TimeoutExpired:
            status = "cut off"
        finally:
            _end(process)
        log.seek(0)
        last = log.read().splitlines()[-OUTPUT_LINES:]
        for trace in RUNS.glob("*/profile/*/rank_0.json.gz"):
            last += summary(trace)
    return CheckResult(check, status, time.monotonic() - start, "\n".join(last))


def _end(process: subprocess.Popen) -> None:
    """End all processes of a program's session."""
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
            process.wait(GRACE)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run_all(part: str, checks: Sequence[Check], seconds: float, out: Path) -> list[CheckResult]:
    """Run programs for at most this many seconds in total, and write the page after each."""
    end = time.monotonic() + seconds
    results: list[CheckResult] = []
    for check in checks:
        results.append(run(check, end - time.monotonic()))
        print(f"{results[-1].status:>12}  {check.title}", flush=True)
        write_page(page(part, results, len(checks)), out)
    return results


def page(part: str, results: Sequence[CheckResult], total: int) -> str:
    """The text of the part's page."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    lines = page_header(f"First check on a GPU: {part}", f"python -m benchmarks.gpu_check {part}", gpu)
    lines += [f"{len(results)} of {total} programs.", ""]
    rows = (table_row([result.check.title, result.status, f"{result.seconds:.0f}"]) for result in results)
    lines += table(("program", "result", "s"), rows)
    for result in results:
        lines += [f"## {result.check.title}", "", f"`{' '.join(result.check.command)}`", ""]
        lines += [*(f"    {line}" for line in result.output.splitlines()), ""]
    return "\n".join(lines)


def _tests(title: str, *files: str) -> Check:
    paths = (f"tests/kernels/test_{file}.py" for file in files)
    return Check(title, (PYTHON, "-m", "pytest", "-q", "-n", "8", "-m", "not second", *paths))


def _attention_benchmark(tokens: int, *more: str) -> Check:
    """Attention benchmarks of this many tokens."""
    limits = ("--min-tokens", str(tokens), "--max-tokens", str(tokens))
    command = (*CLI, "dev", "bench", "attention", "--suite", "default", *limits, *more)
    return Check(
        f"attention, {tokens:,} tokens", (*command, "--out", str(RESULTS / f"gpu_attention_{tokens}.md"))
    )


def _micro_batch(seq_len: int) -> int:
    """Sequences of a micro-batch: 4 of 8 thousand tokens. 4 of 32 thousand would take 155 GB, planned."""
    return max(1, MICRO_BATCH_TOKENS // seq_len)


def profile_checks(results: Path, *options: str) -> Iterator[Check]:
    """Profiles of what people train, the most informative first, with pages in `results`. options: of each program."""
    models = {
        "FLuRKA": ("configs/pretrain-350m.yaml",),
        "softmax": ("configs/pretrain-350m.yaml", "model.attention=softmax"),
        "hybrid": ("configs/pretrain-350m-hybrid.yaml",),
    }
    sizes = [(name, 8192, compiled) for name in models for compiled in ("none", "layer")]
    sizes += [(name, 32_768, compiled) for compiled in ("none", "layer") for name in models]
    for name, seq_len, compiled in sizes:
        title = f"350m, {name}, sequences of {seq_len:,}" + (", compiled" if compiled == "layer" else "")
        page = results / f"gpu_step_350m_{name.lower()}_{seq_len}{'_compiled' * (compiled == 'layer')}.md"
        keys = (
            f"training.seq_len={seq_len}",
            f"training.micro_batch_size={_micro_batch(seq_len)}",
            f"training.compile={compiled}",
        )
        command = (PYTHON, "-m", "benchmarks.step_profile", *models[name], *keys, *options)
        yield Check(title, (*command, "--out", str(page)))


def dry_checks(results: Path) -> list[Check]:
    """`profile_checks` of small models on the CPU: one length, as all are short, and one model that is compiled."""
    options = ("--device", "cpu", "--small", "--steps", "2")
    checks = [check for check in profile_checks(results, *options) if "8,192" in check.title]
    checks = [check for check in checks if "compiled" not in check.title or "FLuRKA" in check.title]
    return sorted(checks, key=lambda check: "compiled" in check.title)  # it takes a minute


def _pretrain(size: str, mechanism: str, seq_len: int, fp8: str | None = None) -> Check:
    """A few steps of a shipped configuration on one GPU, on the standard library's source, two of them profiled.

    fp8: training.fp8 of compiled layers; None: layers are not compiled.
    """
    keys = {
        "run.root": RUNS,
        "run.name": f"{size}-{file_name(mechanism)}-{seq_len}",
        "data.train": "data/stdlib",
        "model.attention": json.dumps(preset_tree(mechanism)),
        "parallel.context": 1,
        "model.vocab_size": VOCAB_SIZE,
        "training.seq_len": seq_len,
        "training.steps": 12,
        "training.eval_samples": 4,
        "training.micro_batch_size": _micro_batch(seq_len),
        "training.global_batch_size": 2 * _micro_batch(seq_len),
        "training.log_every": 1,
        "training.profile": "{start: 10, steps: 2}",
        "schedule.warmup_steps": 2,
    }
    if fp8 is not None:
        keys |= {"training.compile": "layer", "training.fp8": fp8}
    overrides = (f"{key}={value}" for key, value in keys.items())
    command = (*CLI, "pretrain", f"configs/pretrain-{size}.yaml", "--nproc", "1")
    how = "" if fp8 is None else f", compiled, training.fp8={fp8}"
    return Check(f"{size}, {mechanism}, sequences of {seq_len:,}{how}", (*command, *overrides))


CALL = (PYTHON, "-m", "benchmarks.gpu_check", "call")

NCU = (
    *("ncu", "--clock-control", "none", "--kernel-name", "regex:pool|write|pass|merge|window|bwd"),
    *(x for section in ("SpeedOfLight", "WarpStateStats", "Occupancy") for x in ("--section", section)),
    *(PYTHON, "-m", "benchmarks.kernels.times", "--once", "--only", "FLuRKA d=128"),
)
"""What limits FLuRKA's kernels, at the size of `kernel_times`."""

PARTS = {
    "profile": tuple(profile_checks(RESULTS, "--device", "cuda")),
    "correctness": (
        _tests("decoding", "decode", "flurka_decode"),
        _tests("FLuRKA", "flurka_attention", "wrapped"),
        _tests("kernel attention", "kernel_attention", "scales"),
        _tests("states that decay, short convolution", "simple_gla", "gated_delta_rule", "short_convolution"),
        _tests("the other ops", "packed_softmax", "weighted_attention", "low_rank", "liger"),
        _tests("long sequences", "long_sequences"),
        Check(
            "layers, equal runs, training",
            (PYTHON, "-m", "pytest", "-q", "-m", "gpu", "tests/e2e/test_gpu.py"),
        ),
        *(
            Check(
                f"compute-sanitizer {tool}",
                ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *CALL),
            )
            for tool in ("memcheck", "racecheck")
        ),
    ),
    "speed": (
        _attention_benchmark(2**14, "--repeats", "10"),
        Check(
            "kernels by launch",
            (PYTHON, "-m", "benchmarks.kernels.times", "--out", str(RESULTS / "kernel_times.md")),
        ),
        Check(
            "FLuRKA, fused and composed",
            (PYTHON, "-m", "benchmarks.kernels.composed", "--out", str(RESULTS / "gpu_flurka_composed.md")),
        ),
        Check("ncu", NCU),
        _attention_benchmark(2**16, "--repeats", "10"),
    ),
    "training": (
        Check("text", (*CLI, "prepare", "--source", "stdlib", "--tokenizer", "byte", "--out", "data/stdlib")),
        _pretrain("350m", "flurka+convolution", 8192),
        _pretrain("350m", "softmax", 8192),
        _attention_benchmark(
            2**20, "--repeats", "3", "--only", "kernel elu", "--only", "FLuRKA", "--only", "fla chunk"
        ),
        _pretrain("350m", "flurka+convolution", 32_768),
        _pretrain("350m", "softmax", 32_768),
        _pretrain("1b", "flurka+convolution", 8192),
        _pretrain("1b", "softmax", 8192),
        *(_pretrain("1b", "flurka+convolution", 8192, fp8) for fp8 in ("none", "tensorwise", "rowwise")),
    ),
}
"""Part -> its programs, the most informative first."""


def profiled_call(device: str = "cuda", length: int = 1000) -> torch.Tensor:
    """Run a FLuRKA layer forward and backward, then decode one token; returns that token's output."""
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
    """Run a part; return 1 if a program has failed, 2 without a GPU."""
    parser = docstring_parser(__doc__)
    parser.add_argument("part", choices=(*PARTS, "call"))
    parser.add_argument("--dry-run", action="store_true", help="small models on the CPU; for profile")
    options = parser.parse_args()
    part = options.part
    if options.dry_run and part != "profile":
        print(f"gpu_check: --dry-run is given with {part}; it is for profile", file=sys.stderr)
        return 2
    if not options.dry_run and not torch.cuda.is_available():
        print(
            "gpu_check: no GPU is here; run it where `nvidia-smi` lists one, or try it with profile --dry-run",
            file=sys.stderr,
        )
        return 2
    if part == "call":
        profiled_call()
        return 0
    # When an outer time limit ends this process, `run` ends the program that it runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.dry_run:
        out = DRY_RUN / "gpu_profile.md"
        results = run_all("profile --dry-run", dry_checks(DRY_RUN), PART_SECONDS, out)
    else:
        results = run_all(part, PARTS[part], PART_SECONDS, RESULTS / f"gpu_{part}.md")
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())

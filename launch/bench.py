"""`megakernel dev bench`: attention benchmarks on this machine."""

import argparse
import importlib
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from launch.arguments import Number
from launch.messages import console
from megakernel.config import RunFailed, UserError
from megakernel.config.errors import check_writable, report_write_errors

HELP = "benchmark attention against other implementations: time, peak memory, share of the device's limits"
EXAMPLE = "megakernel dev bench attention --suite cpu --max-tokens 4096"

SUITES = ("default", "paper", "cpu")
RESULTS = Path("benchmarks/results")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("what", choices=["attention"], help="what to measure")
    add(
        "--suite",
        choices=SUITES,
        help="default: causal attention, 16k to 1M tokens; paper: whole layers at the FLuRKA paper's settings; "
        "cpu: 1k to 32k tokens without a GPU (default: default, without a GPU cpu)",
    )
    add(
        "--repeats",
        type=Number(int, maximum=1_000_000),
        default=30,
        metavar="R",
        help="runs of each (default: 30)",
    )
    add("--min-tokens", type=Number(int), metavar="T", help="skip cases with fewer tokens, B times N")
    add("--max-tokens", type=Number(int), metavar="T", help="skip cases with more tokens")
    add(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="measure only this implementation; may be given several times",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"output page (default: {RESULTS}/attention_SUITE.md); FILE.partial has the results so far",
    )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark suite, write its page and print it."""
    import torch

    attention = _import_benchmarks()
    name = args.suite or ("default" if torch.cuda.is_available() else "cpu")
    suite = attention.SUITES[name]
    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats} measures nothing; set at least 1")
    if suite.device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--suite {name} needs a GPU and torch sees none; take --suite cpu")
    suite = suite.narrowed(args.min_tokens, args.max_tokens, args.only)
    out = args.out or RESULTS / f"attention_{name}.md"
    check_writable("--out", out)  # the measurements take long
    device = torch.device("cpu")
    if suite.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    stderr = console(stderr=True)
    command = shlex.join(["megakernel", "dev", "bench", "attention", *_result_options(args, name)])
    partial = out.with_name(f"{out.name}.partial")

    def save(result: Any) -> None:
        with suppress(OSError):  # reported at the end, when the results have been printed
            partial.write_text(attention.measured_page(result, device, command), encoding="utf-8")

    try:
        with stderr.status("measuring"):
            result = attention.run_suite(suite, device, args.repeats, stderr.print, save)
        page = attention.measured_page(result, device, command)
        print(page, end="")
        with report_write_errors("--out", out):
            out.write_text(page, encoding="utf-8")
    except RunFailed:
        partial.unlink(missing_ok=True)
        raise
    partial.unlink(missing_ok=True)
    return 0


def _import_benchmarks() -> ModuleType:
    """The module benchmarks.attention, which is not in the installed package."""
    checkout = Path(__file__).parents[1]
    if not (checkout / "benchmarks" / "attention").is_dir():
        raise UserError(f"bench: {checkout} has no benchmarks/; run bench from a checkout of the sources")
    sys.path.insert(0, str(checkout))
    return importlib.import_module("benchmarks.attention")


def _result_options(args: argparse.Namespace, suite: str) -> list[str]:
    """The options that affect the results, as command-line words."""
    options = ["--suite", suite, "--repeats", str(args.repeats)]
    for option, tokens in (("--min-tokens", args.min_tokens), ("--max-tokens", args.max_tokens)):
        options += [] if tokens is None else [option, str(tokens)]
    return options + [part for name in args.only for part in ("--only", name)]

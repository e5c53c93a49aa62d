"""`python -m benchmarks.kernels.attention`: attention on this machine, beside other implementations.

    python -m benchmarks.kernels.attention --suite cpu --max-tokens 4096

Every implementation is checked against float64 first. Measured are time, peak memory and the share of the device's
limits.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.attention import SUITES, measured_page, run_suite
from benchmarks.page import command_line, docstring_parser, run_main
from launch.arguments import Number
from launch.messages import console
from megakernel.config import RunFailed, UserError
from megakernel.config.errors import check_writable, report_write_errors

RESULTS = Path("benchmarks/results")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark suite, write its page and print it."""
    parser = docstring_parser(__doc__)
    add = parser.add_argument
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
    return measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> int:
    """Measure, print the page, and write it."""
    name = args.suite or ("default" if torch.cuda.is_available() else "cpu")
    suite = SUITES[name]
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
    command = command_line("kernels.attention", _result_options(args, name))
    partial = out.with_name(f"{out.name}.partial")

    def save(result: Any) -> None:
        with suppress(OSError):  # reported at the end, when the results have been printed
            partial.write_text(measured_page(result, device, command), encoding="utf-8")

    try:
        with stderr.status("measuring"):
            result = run_suite(suite, device, args.repeats, stderr.print, save)
        page = measured_page(result, device, command)
        print(page, end="")
        with report_write_errors("--out", out):
            out.write_text(page, encoding="utf-8")
    except RunFailed:
        partial.unlink(missing_ok=True)
        raise
    partial.unlink(missing_ok=True)
    return 0


def _result_options(args: argparse.Namespace, suite: str) -> list[str]:
    """The options that affect the results, as command-line words."""
    options = ["--suite", suite, "--repeats", str(args.repeats)]
    for option, tokens in (("--min-tokens", args.min_tokens), ("--max-tokens", args.max_tokens)):
        options += [] if tokens is None else [option, str(tokens)]
    return options + [part for name in args.only for part in ("--only", name)]


if __name__ == "__main__":
    sys.exit(run_main(main))

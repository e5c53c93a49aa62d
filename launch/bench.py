"""`megakernel dev bench`: how fast attention is on this machine."""

import argparse
import importlib
import shlex
import sys
from pathlib import Path
from types import ModuleType

from launch.arguments import Number
from launch.messages import console
from megakernel.config import UserError

HELP = "measure attention: time, peak memory and share of what the device could do, against other implementations"
EXAMPLE = "megakernel dev bench attention --suite cpu --max-tokens 4096"

SUITES = ("default", "paper", "cpu")
RESULTS = Path("benchmarks/results")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("what", choices=["attention"], help="what is measured")
    parser.add_argument(
        "--suite",
        choices=SUITES,
        help="default: causal attention, 16k to 1M tokens; paper: whole layers at the FLuRKA paper's settings; "
        "cpu: 1k to 32k tokens without a GPU (default: default, without a GPU cpu)",
    )
    parser.add_argument(
        "--repeats",
        type=Number(int, most=1_000_000),
        default=30,
        metavar="R",
        help="runs of each (default: 30)",
    )
    parser.add_argument(
        "--max-tokens", type=Number(int), metavar="T", help="leave out cases of more tokens, B times N"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="this implementation alone; repeatable"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"where the page goes (default: {RESULTS}/attention_SUITE.md)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, write the page and print it."""
    import torch

    attention = _from_checkout()
    name = args.suite or ("default" if torch.cuda.is_available() else "cpu")
    suite = attention.SUITES[name]
    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats} measures nothing; set at least 1")
    if suite.device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--suite {name} needs a GPU and torch sees none; take --suite cpu")
    suite = suite.narrowed(args.max_tokens, args.only)
    device = torch.device("cpu")
    if suite.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    stderr = console(stderr=True)
    with stderr.status("measuring") as status:
        tell = status.update if stderr.is_terminal else stderr.print
        survey = attention.survey(suite, device, args.repeats, tell)
    command = shlex.join(["megakernel", "dev", "bench", "attention", *_given(args, name)])
    page = attention.measured_page(survey, device, command)
    out = args.out or RESULTS / f"attention_{name}.md"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    print(page, end="")
    return 0


def _from_checkout() -> ModuleType:
    """benchmarks.attention, which is no part of the installed package."""
    checkout = Path(__file__).parents[1]
    if not (checkout / "benchmarks" / "attention").is_dir():
        raise UserError(
            f"bench: {checkout} holds no benchmarks/, so bench runs from a checkout of the sources alone"
        )
    sys.path.insert(0, str(checkout))
    return importlib.import_module("benchmarks.attention")


def _given(args: argparse.Namespace, suite: str) -> list[str]:
    """The options that decide the numbers, as they would be typed."""
    given = ["--suite", suite, "--repeats", str(args.repeats)]
    given += [] if args.max_tokens is None else ["--max-tokens", str(args.max_tokens)]
    return given + [part for name in args.only for part in ("--only", name)]

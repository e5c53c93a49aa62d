"""`megakernel bench`: how fast attention is on this machine, and what it ought to be on another."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from launch.numbers import Number
from megakernel.config import UserError

if TYPE_CHECKING:
    from megakernel.analysis.speed.suites import Suite

HELP = "measure attention: time, peak memory and share of what the device could do, against other implementations"
EXAMPLE = "megakernel bench attention --suite cpu --max-tokens 4096"

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
        "--predict",
        action="store_true",
        help="measure nothing: count bytes and FLOPs, and predict the times of one H200 from its datasheet",
    )
    parser.add_argument(
        "--repeats",
        type=Number(int, most=1_000_000),
        default=30,
        metavar="R",
        help="runs of each (default: 30)",
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="T", help="leave out cases of more tokens, B times N"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="this contender alone; repeatable"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"where the page goes (default: {RESULTS}/attention_SUITE.md)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure or predict, write the page and print it."""
    import torch

    from megakernel.analysis import speed

    name = args.suite or ("default" if torch.cuda.is_available() or args.predict else "cpu")
    suite = speed.SUITES[name]
    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats} measures nothing; set at least 1")
    if args.predict and suite.device != "cuda":
        raise UserError(
            f"--predict is for one H200 and --suite {name} is for a CPU; take --suite default or paper"
        )
    if not args.predict and suite.device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--suite {name} needs a GPU and torch sees none; take --suite cpu or add --predict")
    suite = suite.narrowed(args.max_tokens, args.only)
    command = shlex.join(["megakernel", "bench", "attention", *_given(args, name)])
    page = _predicted(suite, command) if args.predict else _measured(suite, args.repeats, command)
    out = args.out or RESULTS / f"attention_{name}{'_predicted' if args.predict else ''}.md"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    print(page, end="")
    return 0


def _predicted(suite: "Suite", command: str) -> str:
    from megakernel.analysis import speed

    return speed.predicted_page(suite, speed.H200, command)


def _measured(suite: "Suite", repeats: int, command: str) -> str:
    import torch
    from rich.console import Console

    from megakernel.analysis import speed

    device = torch.device("cpu")
    if suite.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    stderr = Console(stderr=True)
    with stderr.status("measuring") as status:
        tell = status.update if stderr.is_terminal else stderr.print
        survey = speed.survey(suite, device, repeats, tell)
    return speed.measured_page(survey, device, command)


def _given(args: argparse.Namespace, suite: str) -> list[str]:
    """The options that decide the numbers, as they would be typed."""
    given = ["--suite", suite]
    given += ["--predict"] if args.predict else ["--repeats", str(args.repeats)]
    given += [] if args.max_tokens is None else ["--max-tokens", str(args.max_tokens)]
    return given + [part for name in args.only for part in ("--only", name)]

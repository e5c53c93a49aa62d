"""`megakernel plan`: whether a run fits on GPUs that are not at hand, what it sends, and what is nearest that fits."""

import argparse
import json
import re
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from launch.arguments import Number, add_config_arguments
from launch.messages import console
from megakernel.analysis import planning
from megakernel.analysis.planning import Gpu
from megakernel.analysis.planning.gpus import counts_kernels
from megakernel.config import Config, UserError, load
from megakernel.config.errors import check_writable, report_write_errors

HELP = "predict memory and traffic on GPUs, and the nearest layout that fits"
EXAMPLE = "megakernel plan configs/pretrain-7b.yaml --gpus 64 --gpu h100"

ASSUMED_VOCABULARY = 50_257
"""GPT-2's vocabulary size, used if neither the configuration nor prepared data gives one."""

MAX_DEVICES = 1_000_000
"""More than any machine has."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add_config_arguments(parser)
    add("--gpus", required=True, metavar="N or A..B", help="devices; of a range, every power of two in it")
    add("--gpu", required=True, metavar="KIND", help=f"one of {', '.join(planning.GPUS)}")
    add("--top", type=Number(int, 1), metavar="K", help="layouts of each number of devices (default: 5)")
    add("--json", action="store_true", help="print the layouts as JSON, for each number of devices")
    add(
        "--at",
        type=int,
        metavar="N",
        help="of a range, the devices that the configuration is meant for (default: the first)",
    )
    add(
        "--page",
        type=Path,
        metavar="FILE",
        help="write a Markdown page that includes softmax attention, and beside it an SVG picture of the memory",
    )
    add(
        "--network",
        type=Number(float, 1e-3, 1_000_000),
        metavar="GBIT",
        help="has no effect any more: the time of traffic is not predicted",
    )
    add(
        "--gpus-per-node",
        type=Number(int, 1, MAX_DEVICES),
        metavar="N",
        help="devices per node (default: datasheet)",
    )


def run(args: argparse.Namespace) -> int:
    """Plan every device count and print the layouts or, for several counts, how the best ones scale."""
    config = load(args.config, args.overrides)
    counts, gpu = device_counts(args.gpus), _gpu(args)
    if args.at is not None and args.at not in counts:
        raise UserError(f"--at {args.at} is none of --gpus {args.gpus}; choose {', '.join(map(str, counts))}")
    if args.page is not None and args.json:
        raise UserError(f"--page {args.page} is Markdown, and --json prints JSON; leave one out")
    if args.at is not None and args.json:
        raise UserError(
            f"--at {args.at} has no effect with --json, which prints no growing runs; leave one out"
        )
    if args.top is not None and not args.json and (args.page is not None or len(counts) > 1):
        kind = "a range" if args.page is None else "--page"
        raise UserError(f"--top {args.top} has no effect with {kind}; leave it out")
    if args.network is not None:
        print(
            f"--network {args.network:g} has no effect any more: plan counts what is sent, not its time",
            file=sys.stderr,
        )
    if config.deepspeed:
        from megakernel.parallel import prepare_device

        prepare_device("cpu", 0)  # otherwise DeepSpeed prints its choice of device to stdout
        from megakernel.training.deepspeed_config import check_deepspeed_keys

        check_deepspeed_keys(config)
    vocabulary, note = vocabulary_of(config)
    from launch import plan_tables
    from megakernel.analysis.planning.page import SHOWN

    top = args.top or SHOWN
    at = args.at or counts[0]
    if args.page is not None:
        _write_page(args, config, vocabulary, note, counts, at, gpu)
    elif args.json:
        print(json.dumps(_as_json(config, vocabulary, counts, gpu, top), indent=2))
    elif len(counts) == 1:
        with console(stderr=True).status("running the model's layers without numbers, for every layout"):
            plan = planning.plan(config, vocabulary, counts[0], gpu)
        plan_tables.show_plan(plan, vocabulary, note, top)
    else:
        plan_tables.show_scaling(config, vocabulary, counts, at, gpu, note)
    return 0


def _write_page(
    args: argparse.Namespace, config: Config, vocabulary: int, note: str, counts: list[int], at: int, gpu: Gpu
) -> None:
    from megakernel.analysis.planning.page import page

    words = [args.config, *args.overrides, "--gpus", args.gpus, "--gpu", args.gpu]
    for option in ("at", "gpus_per_node", "page"):
        value = getattr(args, option)
        words += [] if value is None else [f"--{option.replace('_', '-')}", str(value)]
    command = shlex.join(["megakernel", "plan", *words])
    picture = args.page.with_name(f"{args.page.stem}.memory.svg")
    for file in (args.page, picture):
        check_writable("--page", file)  # the layouts take a minute
    with console(stderr=True).status("planning"):
        text, bars = page(config, vocabulary, note, counts, at, gpu, command, quote(picture.name))
    print(text, end="")
    with report_write_errors("--page", args.page):
        args.page.write_text(text, encoding="utf-8")
        if bars is not None:
            picture.write_text(bars, encoding="utf-8")


def device_counts(text: str) -> list[int]:
    """`64` -> [64]; `8..4096` -> the powers of two from 8 to 4096."""
    match = re.fullmatch(r"(\d{1,9})(?:\.\.(\d{1,9}))?", text)
    if not match:
        raise UserError(f"--gpus {text} is neither a number nor a range; write 64 or 8..4096")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last <= MAX_DEVICES:
        raise UserError(
            f"--gpus {text} holds no number of devices from 1 to {MAX_DEVICES:,}; write 64 or 8..4096"
        )
    if match[2] is None:
        return [first]
    counts = [2**exponent for exponent in range(last.bit_length()) if first <= 2**exponent <= last]
    if not counts:
        raise UserError(f"--gpus {text} holds no power of two; write 64 or 8..4096")
    return counts


def _gpu(args: argparse.Namespace) -> Gpu:
    if args.gpu not in planning.GPUS:
        raise UserError(f"--gpu {args.gpu} is not known; choose {', '.join(planning.GPUS)}")
    gpu = planning.GPUS[args.gpu]
    return replace(gpu, per_node=args.gpus_per_node or gpu.per_node)


def vocabulary_of(config: Config) -> tuple[int, str]:
    """The vocabulary size of the tokenizer, and a note on where the number is from."""
    from data_pipeline.manifest import Manifest

    model, folder = config.model, config.data.train[0].path
    if model.vocab_size is not None:
        return model.vocab_size - model.special_ids, f"{model.vocab_size:,} ids by model.vocab_size"
    if config.data.tokenizer is not None:
        from data_pipeline import tokenizers

        size = tokenizers.make(config.data.tokenizer, iter(())).vocab_size
        return size, f"{size:,} ids of data.tokenizer={config.data.tokenizer}"
    if folder.is_dir():
        size = Manifest.read(folder).tokenizer.vocab_size
        return size, f"{size:,} ids of the tokenizer of {folder}"
    note = f"{ASSUMED_VOCABULARY:,} ids assumed: {folder} is not prepared, and model.vocab_size not set"
    return ASSUMED_VOCABULARY, note


def _as_json(config: Config, vocabulary: int, counts: list[int], gpu: Gpu, top: int) -> dict[str, Any]:
    plans = [planning.plan(config, vocabulary, count, gpu) for count in counts]
    return {
        "predicted": True,
        "gpu": asdict(gpu),
        "accuracy": planning.ACCURACY,
        "counts_kernels": counts_kernels(),
        "vocabulary": vocabulary,
        "plans": [_plan_as_json(plan, vocabulary, top) for plan in plans],
    }


def _plan_as_json(plan: planning.Plan, vocabulary: int, top: int) -> dict[str, Any]:
    from megakernel.analysis.planning.seconds import nearest_measured, step_flops, step_seconds

    measured = nearest_measured(plan.config, vocabulary, plan.gpu)
    configured, nearest = plan.configured, plan.nearest
    return {
        "gpus": plan.devices,
        "flops": step_flops(plan.config, vocabulary),
        "step_seconds": step_seconds(plan.config, vocabulary, plan.devices, plan.gpu),
        "measured": None if measured is None else asdict(measured),
        "configured": configured if isinstance(configured, str) else _layout_as_json(configured, plan.gpu),
        "nearest": None if nearest is None else _layout_as_json(nearest, plan.gpu),
        "layouts": [_layout_as_json(layout, plan.gpu) for layout in plan.fitting[:top]],
        "do_not_fit": [_layout_as_json(layout, plan.gpu) for layout in plan.too_large],
        "refused": dict(plan.refused),
    }


def _layout_as_json(planned: planning.Planned, gpu: Gpu) -> dict[str, Any]:
    return {
        "layout": vars(planned.layout),
        "keys": planned.layout.keys(),
        "overrides": planned.words,
        "memory_bytes": planned.memory.parts,
        "memory_bytes_total": planned.memory.total,
        "bytes_too_many": max(0.0, planned.memory.beyond(gpu)),
        "sent_bytes": planned.sent,
        "idle": planned.idle,
    }

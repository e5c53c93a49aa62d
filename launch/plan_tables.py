"""The tables of `megakernel plan` on a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.messages import console
from megakernel.analysis import planning
from megakernel.analysis.planning import Gpu, Plan, Planned
from megakernel.analysis.planning.page import NONE, figures, scaled
from megakernel.config import Config

REASONS = 8
"""Reasons against layouts that are shown; JSON has all."""


def show_plan(plan: Plan, gpu: Gpu, vocabulary: str, top: int) -> None:
    """The best layouts of one number of devices, the best of them by part, and why others are out."""
    out = _opened(plan.config, str(plan.devices), gpu, vocabulary)
    if plan.best is None:
        out.print("no layout fits", style="red")
    else:
        shown = plan.fitting[:top]
        out.print(_layouts(shown, gpu))
        out.print(_by_part("memory per device, GB", [one.memory.parts for one in shown], 1e9))
        steps = [one.step for one in shown]
        out.print(_by_part("step, seconds", [step.parts for step in steps], 1.0))
        out.print(_by_part("sent per device and step, GB", [step.sent for step in steps], 1e9))
    _show_others(out, plan, gpu)


def _opened(config: Config, devices: str, gpu: Gpu, vocabulary: str) -> Console:
    """stdout, on which stands what is planned, the assumptions behind it, and how far they were off on a CPU."""
    # A file or a pipe, which has no width, gets lines as long as they are.
    out = console(width=None if console().is_terminal else 200, soft_wrap=True)
    words = f" on {devices} x {gpu.name}: ", ("predicted", "bold"), ", not measured"
    out.print(Text.assemble((config.run.name, "bold"), *words))
    training = config.training
    peak = gpu.peak_of(2 if training.dtype == "bfloat16" else 4)
    out.print(
        f"{training.global_batch_size:,} sequences x {training.seq_len:,} tokens per step, "
        f"{training.dtype}; {vocabulary}"
    )
    out.print(
        f"{gpu.memory / 1e9:g} GB, {gpu.bandwidth / 1e12:g} TB/s, {peak / 1e12:g} TFLOP/s, {gpu.link / 1e9:g} GB/s "
        f"to {gpu.per_node - 1} neighbours and {gpu.network / 1e9:g} GB/s to other nodes ({gpu.source})"
    )
    out.print(f"rates {planning.RATES_TEXT}")
    out.print(f"measured on a CPU: {', '.join(planning.ACCURACY.values())}")
    return out


def _layouts(shown: list[Planned], gpu: Gpu) -> Table:
    table = Table("#", "layout", box=None, pad_edge=False)
    for name in ("step", "tokens/s", "MFU", "memory", "free"):
        table.add_column(name, justify="right")
    for place, one in enumerate(shown, 1):
        seconds, *speed, memory = figures(one)
        free = f"{-one.memory.beyond(gpu) / 1e9:.1f} GB"
        table.add_row(str(place), str(one.layout), f"{seconds} s", *speed, f"{memory} GB", free)
    return table


def _by_part(title: str, columns: list[dict[str, float]], unit: float) -> Table:
    table = Table(title, box=None, pad_edge=False)
    for place in range(len(columns)):
        table.add_column(f"#{place + 1}", justify="right")
    names = list(dict.fromkeys(name for column in columns for name in column))
    for name in names:
        table.add_row(name, *(f"{column.get(name, 0.0) / unit:.3g}" for column in columns))
    table.add_row("total", *(f"{sum(column.values()) / unit:.3g}" for column in columns), style="bold")
    return table


def _show_others(out: Console, plan: Plan, gpu: Gpu) -> None:
    if plan.too_large:
        out.print(f"{len(plan.too_large)} cuts do not fit into {gpu.memory / 1e9:g} GB, the nearest:")
        for one in plan.too_large[:REASONS]:
            name, most = max(one.memory.parts.items(), key=lambda part: part[1])
            over = one.memory.beyond(gpu) / 1e9
            out.print(
                f"  {one.layout}: {over:.1f} GB too many, {most / 1e9:.1f} GB of them {name}", style="dim"
            )
    if plan.refused:
        out.print(f"{sum(plan.refused.values())} cuts are none:")
        for reason, count in plan.refused.most_common(REASONS):
            out.print(f"  {count} x {reason}", style="dim")
        if len(plan.refused) > REASONS:
            out.print(f"  and {len(plan.refused) - REASONS} reasons more, in --json", style="dim")


def show_scaling(
    config: Config, vocabulary_size: int, counts: list[int], at: int, gpu: Gpu, vocabulary: str
) -> None:
    """The best layouts of each number of devices, for a run that stays and for runs that grow."""
    out = _opened(config, f"{counts[0]} to {counts[-1]}", gpu, vocabulary)
    for way, title in planning.WAYS.items():
        with console(stderr=True).status(f"planning {title}"):
            plans = list(planning.scaling(config, vocabulary_size, counts, way, gpu, at))
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in (
            "GPUs",
            "sequences",
            "tokens of a sequence",
            "step",
            "tokens/s",
            "MFU",
            "memory",
            "efficiency",
        ):
            table.add_column(name, justify="right")
        table.add_column("layout")
        for *sizes, seconds, tokens, mfu, memory, share, layout in scaled(plans):
            fits = seconds != NONE
            units = [f"{seconds} s", tokens, mfu, f"{memory} GB"] if fits else [NONE] * 4
            table.add_row(*sizes, *units, share, layout)
        out.print(table)

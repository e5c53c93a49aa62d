"""Terminal tables of `megakernel plan`."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.messages import console
from megakernel.analysis import planning
from megakernel.analysis.planning import Gpu, Plan, Planned
from megakernel.analysis.planning.page import NONE, SIZES, figures, scaled
from megakernel.config import Config

MAX_LISTED = 8
"""Most too large layouts, and most reasons against invalid ones, that are listed; JSON has all."""


def show_plan(plan: Plan, gpu: Gpu, vocabulary: str, top: int) -> None:
    """Print the best layouts for one device count, their memory, time and traffic by part, and why others are out."""
    out = _print_header(plan.config, str(plan.devices), gpu, vocabulary)
    if plan.best is None:
        out.print("no layout fits", style="red")
    else:
        best = plan.fitting[:top]
        out.print(_layouts(best, gpu))
        out.print(_by_part("memory per device, GB", [layout.memory.parts for layout in best], 1e9))
        steps = [layout.step for layout in best]
        out.print(_by_part("step, seconds", [step.parts for step in steps], 1.0))
        out.print(_by_part("sent per device and step, GB", [step.sent for step in steps], 1e9))
    _show_others(out, plan, gpu)


def _print_header(config: Config, devices: str, gpu: Gpu, vocabulary: str) -> Console:
    """A console for stdout, after printing what is planned, the assumed rates, and their error measured on a CPU."""
    # A file or a pipe has no width: its lines stay whole.
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
        f"to {gpu.per_node - 1} neighbors and {gpu.network / 1e9:g} GB/s to other nodes ({gpu.source})"
    )
    out.print(f"rates {planning.RATES_TEXT}")
    out.print(f"measured on a CPU: {', '.join(planning.ACCURACY.values())}")
    return out


def _layouts(best: list[Planned], gpu: Gpu) -> Table:
    table = Table("#", "layout", box=None, pad_edge=False)
    for name in ("step", "tokens/s", "MFU", "memory", "free"):
        table.add_column(name, justify="right")
    for number, planned in enumerate(best, 1):
        seconds, *speed, memory = figures(planned)
        free = f"{-planned.memory.beyond(gpu) / 1e9:.1f} GB"
        table.add_row(str(number), str(planned.layout), f"{seconds} s", *speed, f"{memory} GB", free)
    return table


def _by_part(title: str, columns: list[dict[str, float]], unit: float) -> Table:
    table = Table(title, box=None, pad_edge=False)
    for number in range(1, len(columns) + 1):
        table.add_column(f"#{number}", justify="right")
    names = list(dict.fromkeys(name for column in columns for name in column))
    for name in names:
        table.add_row(name, *(f"{column.get(name, 0.0) / unit:.3g}" for column in columns))
    table.add_row("total", *(f"{sum(column.values()) / unit:.3g}" for column in columns), style="bold")
    return table


def _show_others(out: Console, plan: Plan, gpu: Gpu) -> None:
    if plan.too_large:
        out.print(f"{len(plan.too_large)} layouts do not fit into {gpu.memory / 1e9:g} GB; the closest:")
        for sized in plan.too_large[:MAX_LISTED]:
            name, most = max(sized.memory.parts.items(), key=lambda part: part[1])
            over = sized.memory.beyond(gpu) / 1e9
            text = f"  {sized.layout}: {over:.1f} GB too many, {most / 1e9:.1f} GB of them {name}"
            out.print(text, style="dim")
    if plan.refused:
        out.print(f"{sum(plan.refused.values())} layouts are invalid:")
        for reason, count in plan.refused.most_common(MAX_LISTED):
            out.print(f"  {count} x {reason}", style="dim")
        if len(plan.refused) > MAX_LISTED:
            out.print(f"  and {len(plan.refused) - MAX_LISTED} more reasons, in --json", style="dim")


def show_scaling(
    config: Config, vocabulary_size: int, counts: list[int], at: int, gpu: Gpu, vocabulary: str
) -> None:
    """Print the best layout for each device count, for a fixed run and for runs that grow with the devices."""
    out = _print_header(config, f"{counts[0]} to {counts[-1]}", gpu, vocabulary)
    for way, title in planning.WAYS.items():
        with console(stderr=True).status(f"planning {title}"):
            plans = list(planning.scaling(config, vocabulary_size, counts, way, gpu, at))
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in (*SIZES, "step", "tokens/s", "MFU", "memory", "efficiency"):
            table.add_column(name, justify="right")
        table.add_column("layout")
        for *sizes, seconds, tokens, mfu, memory, share, layout in scaled(plans):
            fits = seconds != NONE
            units = [f"{seconds} s", tokens, mfu, f"{memory} GB"] if fits else [NONE] * 4
            table.add_row(*sizes, *units, share, layout)
        out.print(table)

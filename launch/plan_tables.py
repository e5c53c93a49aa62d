"""What `megakernel plan` prints on a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.messages import console
from megakernel.analysis import planning
from megakernel.analysis.planning import Gpu, Plan, page
from megakernel.analysis.planning.gpus import CHUNKED_FORM, counts_kernels
from megakernel.analysis.planning.seconds import seconds_line
from megakernel.config import Config
from megakernel.config.extras import install

MAX_LISTED = 8
"""Most too large layouts, and most reasons against invalid ones, that are listed; JSON has all."""


def show_plan(plan: Plan, vocab_size: int, vocabulary: str, top: int) -> None:
    """Print the best layouts, their memory and traffic by part, why others are out, and what to change to fit."""
    gpu = plan.gpu
    out = _print_header(plan.config, str(plan.devices), gpu, vocabulary)
    out.print(seconds_line(plan.config, vocab_size, plan.devices, gpu))
    shown = page.listed(plan, top)
    for table in (page.layouts(shown, gpu), *page.parts(shown)) if shown else ():
        out.print(_rich(table))
    _show_others(out, plan)
    for line in verdict(plan):
        out.print(line)


def verdict(plan: Plan) -> list[str]:
    """Whether the configured layout fits, and the overrides to paste."""
    configured, nearest, best = plan.configured, plan.nearest, plan.best
    if isinstance(configured, str):
        lines = [f"not possible as configured: {configured}"]
    elif (over := configured.memory.beyond(plan.gpu)) > 0:
        name, most = max(configured.memory.parts.items(), key=lambda part: part[1])
        lines = [f"does not fit as configured: {over / 1e9:.1f} GB too many, {most / 1e9:.1f} GB are {name}"]
    else:
        lines = [f"fits as configured: {-over / 1e9:.1f} GB free"]
    if nearest is None:
        return [*lines, f"no layout fits: {plan.why_none}"]
    if nearest is not configured:
        lines.append(f"nearest that fits: {nearest.words}")
    if best is not None and best.rank < nearest.rank:
        lines.append(f"least recomputation, cuts and traffic (#1): {best.words}")
    return lines


def _print_header(config: Config, devices: str, gpu: Gpu, vocabulary: str) -> Console:
    """A console for stdout, after printing what is planned, and the error of such plans measured on a CPU."""
    # A file or a pipe has no width: its lines stay whole.
    out = console(width=None if console().is_terminal else 200, soft_wrap=True)
    words = f" on {devices} x {gpu.name}: ", ("predicted", "bold"), ", not measured"
    out.print(Text.assemble((config.run.name, "bold"), *words))
    training = config.training
    out.print(
        f"{training.global_batch_size:,} sequences x {training.seq_len:,} tokens per step, "
        f"{training.dtype}; {vocabulary}"
    )
    out.print(f"{gpu.memory / 1e9:g} GB per GPU, {gpu.per_node} GPUs per node ({gpu.source})")
    out.print(f"measured on a CPU: {', '.join(planning.ACCURACY.values())}")
    if not counts_kernels():
        least, most = CHUNKED_FORM
        out.print(
            "Triton is not installed: attention other than softmax is counted in its chunked form, which kept "
            f"{least:g} to {most:g} times what kernels do in layers of the 350m model; {install('gpu')}"
        )
    return out


def _rich(table: page.PlanTable, title: str | None = None) -> Table:
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in table.columns:
        shown.add_column(
            column, justify="left" if column in (table.columns[0], "layout", "recompute") else "right"
        )
    for *cells, last in table.rows:
        shown.add_row(*cells, last, style="bold" if cells[0] == "total" else None)
    return shown


def _show_others(out: Console, plan: Plan) -> None:
    if plan.too_large:
        out.print(f"{len(plan.too_large)} layouts do not fit into {plan.gpu.memory / 1e9:g} GB; the closest:")
        for one in plan.too_large[:MAX_LISTED]:
            name, most = max(one.memory.parts.items(), key=lambda part: part[1])
            over = one.memory.beyond(plan.gpu) / 1e9
            text = f"  {one.layout}: {over:.1f} GB too many, {most / 1e9:.1f} GB of them {name}"
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
    out.print(f"on {at}, {seconds_line(config, vocabulary_size, at, gpu)}")
    for way, title in planning.WAYS.items():
        with console(stderr=True).status(f"planning {title}"):
            plans = list(planning.scaling(config, vocabulary_size, counts, way, gpu, at))
        out.print(_rich(page.growing(plans, vocabulary_size), title))

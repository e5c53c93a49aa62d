"""A page of Markdown: a run on many devices, how it scales, and what softmax attention would make of it."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import date

from megakernel.config import Config

from .baselines import BASELINES, compare
from .gpus import Gpu
from .plan import Plan, Planned
from .rates import ASSUMED
from .scaling import WAYS, Point, Way, efficiency, grow, scaling

SHOWN = 5
"""Layouts of the middle number of devices."""

NONE = "—"
"""A figure of no layout."""

SIZES = ("GPUs", "rows", "tokens of a row")
SCALED = (*SIZES, "step, s", "tokens/s", "MFU", "memory, GB", "per GPU", "layout")


def page(
    config: Config, vocabulary: int, note: str, counts: list[int], at: int, gpu: Gpu, command: str
) -> str:
    """The whole page; `at` devices are those for which the configuration is meant."""
    points = {way: list(scaling(config, vocabulary, counts, way, gpu, at=at)) for way in WAYS}
    own = next(point.plan for point in points["strong"] if point.plan.devices == at)
    lines = [*_opening(config, note, at, gpu, command), *_best(own, gpu)]
    for way, title in WAYS.items():
        lines += [f"## {_capital(title)}: *predicted*", "", *markdown(SCALED, scaled(points[way])), ""]
    lines += _baselines(config, vocabulary, counts, at, gpu)
    return "\n".join(lines).rstrip() + "\n"


def _opening(config: Config, note: str, at: int, gpu: Gpu, command: str) -> list[str]:
    training = config.training
    return [
        f"# {config.run.name}, {training.seq_len:,} tokens a row, on {at:,} GPUs: *predicted*",
        "",
        f"`{command}`, {date.today().isoformat()}. **Nothing on this page was measured**; what each number is made of, "
        "and how far the same model was off on a CPU, stands in [docs/planning.md](../../docs/planning.md).",
        "",
        f"* {gpu.name}: {gpu.memory / 1e9:g} GB, {gpu.bandwidth / 1e12:g} TB/s, {gpu.peak / 1e12:g} TFLOP/s in "
        f"bfloat16, {gpu.link / 1e9:g} GB/s to the {gpu.per_node - 1} others of its node and "
        f"{gpu.network / 1e9:g} GB/s to other nodes ({gpu.source}).",
        f"* Shares of these limits ({ASSUMED.source}): {ASSUMED.as_text()}.",
        f"* {training.global_batch_size:,} row(s) of {training.seq_len:,} tokens per step, {training.dtype}; {note}.",
        "* tp, cp, dp, pp: tensor, context, data and pipeline ranks; sp: sequence parallelism.",
        "",
    ]


def _best(plan: Plan, gpu: Gpu) -> list[str]:
    lines = [f"## The best layouts of {plan.devices:,} GPUs: *predicted*", ""]
    rows = [
        [str(one.layout), *figures(one), f"{-one.memory.beyond(gpu) / 1e9:.1f}"]
        for one in plan.fitting[:SHOWN]
    ]
    lines += [*markdown(["layout", "step, s", "tokens/s", "MFU", "memory, GB", "free, GB"], rows), ""]
    if plan.best is not None and plan.best.step is not None:
        step = plan.best.step
        parts = [("memory, GB", plan.best.memory.parts, 1e9), ("step, s", step.parts, 1.0)]
        parts.append(("sent per device and step, GB", step.sent, 1e9))
        lines += ["Of the first:", ""]
        for name, found, unit in parts:
            cells = ", ".join(f"{part} {value / unit:.3g}" for part, value in found.items() if value)
            lines.append(f"* {name}: {cells}.")
        lines.append(f"* {step.hidden:.3g} s of traffic are hidden behind attention.")
        lines.append("")
    return lines


def scaled(points: list[Point]) -> Iterator[list[str]]:
    """A line for each number of devices: devices, rows, tokens of a row, `figures`, speed per device, layout."""
    for point, share in zip(points, efficiency(points)):
        training, best = point.config.training, point.plan.best
        sizes = [f"{point.plan.devices:,}", f"{training.global_batch_size:,}", f"{training.seq_len:,}"]
        if best is None:
            yield [*sizes, *[NONE] * 5, point.plan.why_none]
        else:
            yield [*sizes, *figures(best), f"{share:.0%}", str(best.layout)]


def _baselines(config: Config, vocabulary: int, counts: list[int], at: int, gpu: Gpu) -> Iterator[str]:
    yield "## Softmax attention in the same model: *predicted*"
    yield ""
    yield (
        "The same Transformer on the same devices, each with its best layout. Ring: keys and values pass every device "
        "behind the work on those before, balanced over the devices. Ulysses: tokens are traded for heads, whose "
        "number the shards divide. Heads over tensor ranks: also across nodes, up to the number of heads, without "
        "context ranks. Rows are one document each, so that no masks are kept. A step in seconds; *times* is over the "
        "first."
    )
    yield ""
    ways: list[Way] = ["strong", "longer"]
    for way in ways:
        rows = []
        for count in counts:
            grown = grow(config, way, count, at)
            if grown is None:
                continue
            plans = list(compare(grown, vocabulary, count, gpu))
            rows.append([f"{count:,}", f"{grown.training.seq_len:,}", *_against(plans)])
        yield f"### {_capital(WAYS[way])}"
        yield ""
        yield from markdown(["GPUs", "tokens of a row", *(baseline.name for baseline in BASELINES)], rows)
        yield ""


def _against(plans: list[Plan]) -> Iterator[str]:
    """The step of each, and how often the first fits into it."""
    base = plans[0].best
    for plan in plans:
        best = plan.best
        if best is None or best.step is None:
            yield plan.why_none
        elif base is None or base.step is None or plan is plans[0]:
            yield f"{number(best.step.seconds)} s, {best.memory.total / 1e9:.0f} GB"
        else:
            times = best.step.seconds / base.step.seconds
            yield f"{number(best.step.seconds)} s, {number(times)} times"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def figures(one: Planned) -> list[str]:
    """Of a layout that fits: seconds of a step, tokens per second, MFU, GB of memory."""
    assert one.step is not None
    step = one.step
    speed = [number(step.seconds), f"{step.tokens_per_second:,.0f}", f"{step.mfu:.1%}"]
    return [*speed, f"{one.memory.total / 1e9:.1f}"]


def number(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *rows]]

"""The tables of `megakernel plan`, and its Markdown page: layouts, scaling, the same model with softmax attention."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from typing import NamedTuple

from megakernel.config import Attention, Config, expand_preset

from .bars import memory_bars
from .gpus import Gpu
from .plan import WAYS, Plan, Planned, plan, scaling
from .seconds import seconds_line, step_flops

SHOWN = 5
"""Number of layouts listed by default."""

NONE = "—"
"""Cell for a number of devices on which no layout fits."""


class PlanTable(NamedTuple):
    """The columns and rows of a table; all but the first column, of names, and those of words are numbers."""

    columns: Sequence[str]
    rows: list[list[str]]


def listed(plan: Plan, top: int) -> dict[str, Planned]:
    """Name -> layout: the configured one, then the best that fit."""
    configured = {} if isinstance(plan.configured, str) else {"configured": plan.configured}
    return configured | {f"#{number}": one for number, one in enumerate(plan.fitting[:top], 1)}


def layouts(planned: Mapping[str, Planned], gpu: Gpu) -> PlanTable:
    """What each layout holds and sends in total."""
    rows = []
    for name, one in planned.items():
        sizes = (one.memory.total, -one.memory.beyond(gpu), sum(one.sent.values()))
        rows.append([name, *one.layout.parts.values(), *(f"{x / 1e9:.1f}" for x in sizes), f"{one.idle:.0%}"])
    parts_of_layout = [name.replace(" ", "\n") for name in next(iter(planned.values())).layout.parts]
    return PlanTable(("", *parts_of_layout, "memory,\nGB", "free,\nGB", "sent,\nGB", "idle"), rows)


def parts(planned: Mapping[str, Planned]) -> Iterator[PlanTable]:
    """Memory by part, and traffic of a step by group, of each layout."""
    memory, sent = (
        [part(one) for one in planned.values()] for part in (lambda x: x.memory.parts, lambda x: x.sent)
    )
    for title, columns in (("memory per device, GB", memory), ("sent per device and step, GB", sent)):
        names = dict.fromkeys(name for column in columns for name in column if column[name])
        rows = [[name, *(f"{column.get(name, 0.0) / 1e9:.3g}" for column in columns)] for name in names]
        rows.append(["total", *(f"{sum(column.values()) / 1e9:.3g}" for column in columns)])
        yield PlanTable((title, *planned), rows)


def growing(plans: Iterable[Plan], vocab_size: int) -> PlanTable:
    """The best layout of each number of devices, or why there is none."""
    rows = []
    for one in plans:
        training, best = one.config.training, one.best
        sizes = [f"{size:,}" for size in (one.devices, training.global_batch_size, training.seq_len)]
        found = [NONE, NONE, one.why_none] if best is None else [*_memory_and_sent(best), str(best.layout)]
        rows.append([*sizes, f"{step_flops(one.config, vocab_size) / one.devices:.3g}", *found])
    return PlanTable(
        ("GPUs", "sequences", "tokens", "FLOPs per GPU", "memory, GB", "sent, GB", "layout"), rows
    )


def _memory_and_sent(planned: Planned) -> list[str]:
    return [f"{size / 1e9:.1f}" for size in (planned.memory.total, sum(planned.sent.values()))]


def page(
    config: Config,
    vocabulary: int,
    note: str,
    counts: list[int],
    at: int,
    gpu: Gpu,
    command: str,
    picture: str,
) -> tuple[str, str | None]:
    """The whole page, and its picture of the layouts' memory (SVG; None if no layout is listed).

    Args:
        config: the run.
        vocabulary: ids of the tokenizer.
        note: where that number is from.
        counts: numbers of devices.
        at: the number of devices for which the configuration is meant.
        gpu: the device.
        command: the command that makes the page.
        picture: the name under which the page shows its picture.
    """
    plans = {way: list(scaling(config, vocabulary, counts, way, gpu, at)) for way in WAYS}
    configured = next(one for one in plans["strong"] if one.devices == at)
    lines = [
        *_opening(config, vocabulary, note, at, gpu, command),
        f"## The best layouts of {at:,} GPUs: *predicted*",
    ]
    shown = listed(configured, SHOWN)
    bars = memory_bars(shown, gpu) if shown else None
    if bars is None:
        lines += ["", f"No layout fits: {configured.why_none}."]
    else:
        lines += ["", *markdown(layouts(shown, gpu))]
        lines += ["", f"![Memory per device by part, as stacked bars: the first table below]({picture})"]
        for table in parts(shown):
            lines += ["", *markdown(table)]
    for way, title in WAYS.items():
        lines += ["", f"## {title.capitalize()}: *predicted*", "", *markdown(growing(plans[way], vocabulary))]
    against = plan(with_attention(config, "softmax"), vocabulary, at, gpu)
    table = growing([configured, against], vocabulary)
    rows = [[name, *row] for name, row in zip(("as configured", "softmax"), table.rows)]
    lines += ["", f"## Softmax attention in the same model on {at:,} GPUs: *predicted*", "", _SOFTMAX, ""]
    lines += markdown(PlanTable(("attention", *table.columns), rows))
    return "\n".join(lines) + "\n", bars


_SOFTMAX = (
    "The same Transformer, with its best layout. Keys and values pass all context ranks (ring attention) where their "
    "number does not divide the heads, else all-to-alls exchange tokens for heads (Ulysses). Sequences are one "
    "document each."
)


def _opening(config: Config, vocabulary: int, note: str, at: int, gpu: Gpu, command: str) -> list[str]:
    training = config.training
    return [
        f"# {config.run.name}, {training.seq_len:,} tokens a sequence, on {at:,} GPUs: *predicted*",
        "",
        f"`{command}`, {date.today().isoformat()}. **Nothing on this page was measured**; "
        "[docs/planning.md](../../docs/planning.md) explains the numbers and how far the same model was off on a CPU.",
        "",
        f"* {gpu.name}: {gpu.memory / 1e9:g} GB, {gpu.per_node} of a node ({gpu.source}).",
        f"* {training.global_batch_size:,} sequence(s) of {training.seq_len:,} tokens a step, {training.dtype}; {note}",
        "* tp, cp, dp, pp: tensor, context, data and pipeline ranks; sp: sequence parallelism.",
        f"* {seconds_line(config, vocabulary, at, gpu)}.",
        "",
    ]


def with_attention(config: Config, preset: str) -> Config:
    """The same run with another attention in all layers, and one document per sequence."""
    attention = Attention.model_validate(expand_preset(preset))
    model = config.model.model_copy(update={"attention": attention, "attention_pattern": None})
    data = config.data.model_copy(update={"isolate_documents": False})
    return config.model_copy(update={"model": model, "data": data})


def markdown(table: PlanTable) -> list[str]:
    """The lines of a table."""
    lines = [[name.replace("\n", " ") for name in table.columns], ["---"] * len(table.columns), *table.rows]
    return [f"| {' | '.join(line)} |" for line in lines]

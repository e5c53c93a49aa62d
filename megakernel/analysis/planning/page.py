"""A Markdown page: layouts of a run on many devices, its scaling, and a comparison with softmax attention."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from functools import partial

from megakernel.config import Attention, Config, expand_preset

from .gpus import RATES_TEXT, Gpu
from .plan import WAYS, Plan, Planned, Way, efficiency, plan, scaled_config, scaling

SHOWN = 5
"""Number of layouts listed for the configured number of devices."""

NONE = "—"
"""Cell for a number of devices on which no layout fits."""

SIZES = ("GPUs", "sequences", "tokens of a sequence")
SCALED = (*SIZES, "step, s", "tokens/s", "MFU", "memory, GB", "per GPU", "layout")


def page(
    config: Config, vocabulary: int, note: str, counts: list[int], at: int, gpu: Gpu, command: str
) -> str:
    """The whole page; at: the number of devices for which the configuration is meant."""
    plans = {way: list(scaling(config, vocabulary, counts, way, gpu, at)) for way in WAYS}
    configured = next(x for x in plans["strong"] if x.devices == at)
    lines = [*_opening(config, note, at, gpu, command), *_best(configured, gpu)]
    for way, title in WAYS.items():
        lines += [f"## {_capital(title)}: *predicted*", "", *markdown(SCALED, scaled(plans[way])), ""]
    lines += _baselines(config, vocabulary, counts, at, gpu)
    return "\n".join(lines).rstrip() + "\n"


def _opening(config: Config, note: str, at: int, gpu: Gpu, command: str) -> list[str]:
    training = config.training
    return [
        f"# {config.run.name}, {training.seq_len:,} tokens a sequence, on {at:,} GPUs: *predicted*",
        "",
        f"`{command}`, {date.today().isoformat()}. **Nothing on this page was measured**; "
        "[docs/planning.md](../../docs/planning.md) explains the numbers and how far the same model was off on a CPU.",
        "",
        f"* {gpu.name}: {gpu.memory / 1e9:g} GB, {gpu.bandwidth / 1e12:g} TB/s, {gpu.peak / 1e12:g} TFLOP/s in "
        f"bfloat16, {gpu.link / 1e9:g} GB/s to the {gpu.per_node - 1} others of its node and "
        f"{gpu.network / 1e9:g} GB/s to other nodes ({gpu.source}).",
        f"* Shares of these limits {RATES_TEXT}.",
        f"* {training.global_batch_size:,} sequence(s) of {training.seq_len:,} tokens a step, {training.dtype}; {note}",
        "* tp, cp, dp, pp: tensor, context, data and pipeline ranks; sp: sequence parallelism.",
        "",
    ]


def _best(plan: Plan, gpu: Gpu) -> list[str]:
    lines = [f"## The best layouts of {plan.devices:,} GPUs: *predicted*", ""]
    rows = [
        [str(planned.layout), *figures(planned), f"{-planned.memory.beyond(gpu) / 1e9:.1f}"]
        for planned in plan.fitting[:SHOWN]
    ]
    lines += [*markdown(["layout", "step, s", "tokens/s", "MFU", "memory, GB", "free, GB"], rows), ""]
    if plan.best is not None:
        step = plan.best.step
        parts = [("memory, GB", plan.best.memory.parts, 1e9), ("step, s", step.parts, 1.0)]
        parts.append(("sent per device and step, GB", step.sent, 1e9))
        lines += ["Of the first:", ""]
        for name, amounts, unit in parts:
            cells = ", ".join(f"{part} {value / unit:.3g}" for part, value in amounts.items() if value)
            lines.append(f"* {name}: {cells}.")
        lines.append(f"* {step.hidden:.3g} s of traffic overlap with attention.")
        lines.append("")
    return lines


def scaled(plans: list[Plan]) -> Iterator[list[str]]:
    """A row for each number of devices: devices, sequences, their tokens, `figures`, speed per device, layout."""
    for scaled_plan, share in zip(plans, efficiency(plans)):
        training, best = scaled_plan.config.training, scaled_plan.best
        sizes = [f"{scaled_plan.devices:,}", f"{training.global_batch_size:,}", f"{training.seq_len:,}"]
        if best is None:
            yield [*sizes, *[NONE] * 5, scaled_plan.why_none]
        else:
            yield [*sizes, *figures(best), f"{share:.0%}", str(best.layout)]


def with_attention(config: Config, preset: str) -> Config:
    """The same run with another attention in all layers, and one document per sequence."""
    attention = Attention.model_validate(expand_preset(preset))
    model = config.model.model_copy(update={"attention": attention, "attention_pattern": None})
    data = config.data.model_copy(update={"isolate_documents": False})
    return config.model_copy(update={"model": model, "data": data})


def compare(config: Config, vocab_size: int, devices: int, gpu: Gpu) -> dict[str, Plan]:
    """Plans of the run, and of the same Transformer with softmax attention and several ways to shard a sequence.

    Softmax gets favorable assumptions: fused kernels, work that is balanced over the devices despite the causal mask,
    and one document per sequence, so that no masks are kept.
    """
    softmax = with_attention(config, "softmax")
    planned = partial(plan, vocab_size=vocab_size, devices=devices, gpu=gpu)
    # A ring allows any number of shards, as state passing does: hence the rules for `linear`.
    by_ring = planned(softmax, exchange="ring", rules=with_attention(config, "linear"))
    # Tensor ranks, also across nodes, share the heads; there are no context ranks.
    by_heads = planned(softmax, max_tensor=config.model.num_heads, max_context=1)
    return {
        "as configured: states and windows": planned(config),
        "softmax, ring attention": by_ring,
        "softmax, Ulysses": planned(softmax),
        "softmax, heads over tensor ranks": by_heads,
    }


def _baselines(config: Config, vocabulary: int, counts: list[int], at: int, gpu: Gpu) -> Iterator[str]:
    yield "## Softmax attention in the same model: *predicted*"
    yield ""
    yield (
        "The same Transformer on the same devices, each with its best layout. Ring: keys and values pass every device "
        "while it works on the previous ones; work is balanced over the devices. Ulysses: all-to-alls exchange tokens "
        "for heads, which requires that context ranks divide the heads. Heads over tensor ranks: also across nodes, up "
        "to the number of heads, without context ranks. Sequences are one document each: no masks are kept. Cells are "
        "seconds of a step; *times* is relative to the first column."
    )
    yield ""
    ways: list[Way] = ["strong", "longer"]
    for way in ways:
        grown = ((count, scaled_config(config, way, count, at)) for count in counts)
        comparisons = [compare(run, vocabulary, count, gpu) for count, run in grown if run is not None]
        rows = []
        for plans in comparisons:
            first = next(iter(plans.values()))
            rows.append(
                [f"{first.devices:,}", f"{first.config.training.seq_len:,}", *_against([*plans.values()])]
            )
        yield f"### {_capital(WAYS[way])}"
        yield ""
        yield from markdown(["GPUs", "tokens of a sequence", *comparisons[0]], rows)
        yield ""


def _against(plans: list[Plan]) -> Iterator[str]:
    """The step time of each plan, and its ratio to the first plan's."""
    base = plans[0].best
    for compared in plans:
        best = compared.best
        if best is None:
            yield compared.why_none
        elif base is None or compared is plans[0]:
            yield f"{number(best.step.seconds)} s, {best.memory.total / 1e9:.0f} GB"
        else:
            times = best.step.seconds / base.step.seconds
            yield f"{number(best.step.seconds)} s, {number(times)} times"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def figures(planned: Planned) -> list[str]:
    """Cells for step time in seconds, tokens per second, MFU and GB of memory."""
    step = planned.step
    speed = [number(step.seconds), f"{step.tokens_per_second:,.0f}", f"{step.mfu:.1%}"]
    return [*speed, f"{planned.memory.total / 1e9:.1f}"]


def number(value: float) -> str:
    """A number with three significant digits or, from 100 on, as an integer."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *rows]]

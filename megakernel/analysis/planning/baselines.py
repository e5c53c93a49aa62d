"""The same Transformer with softmax attention, on the same devices: what its exchanges would make of long rows.

All baselines are given what they do best: fused softmax, work balanced over the devices although half of the pairs are
hidden, and rows without documents, so that no masks are kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megakernel.config import Attention, Config, expand_preset

from .gpus import Gpu
from .layout import Exchange
from .plan import Plan, plan
from .rates import ASSUMED, Rates


@dataclass(frozen=True)
class Baseline:
    """A way to share a row among devices."""

    name: str
    attention: str
    """Preset of all layers; empty: as configured."""

    exchange: Exchange = "own"
    rules: str | None = None
    """Preset whose rules for context ranks hold; None: the attention's."""

    by_heads: bool = False
    """Whether tensor ranks, also of several nodes, share the heads, and no row is cut over context ranks."""


BASELINES = (
    Baseline("as configured: states and windows", ""),
    # Shards of keys pass every device, so any number of shards is allowed, as it is to states.
    Baseline("softmax, ring attention", "softmax", "ring", rules="linear"),
    Baseline("softmax, Ulysses", "softmax"),
    Baseline("softmax, heads over tensor ranks", "softmax", by_heads=True),
)


def with_attention(config: Config, preset: str) -> Config:
    """The same run with another attention in all layers, and rows that are one document each."""
    form = Attention.model_validate(expand_preset(preset))
    model = config.model.model_copy(update={"attention": form, "attention_pattern": None})
    data = config.data.model_copy(update={"isolate_documents": False})
    return config.model_copy(update={"model": model, "data": data})


def compare(
    config: Config, vocab_size: int, devices: int, gpu: Gpu, rates: Rates = ASSUMED
) -> Iterator[Plan]:
    """The plan of every one of BASELINES."""
    for baseline in BASELINES:
        run = with_attention(config, baseline.attention) if baseline.attention else config
        rules = run if baseline.rules is None else with_attention(config, baseline.rules)
        tensor, context = (config.model.num_heads, 1) if baseline.by_heads else (None, None)
        yield plan(run, vocab_size, devices, gpu, rates, baseline.exchange, rules, tensor, context)

"""The same Transformer with softmax attention, on the same devices: what its exchanges would make of long rows.

All rivals are given what they do best: fused softmax, work balanced over the devices although half of the pairs are
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
class Rival:
    """A way to share a row among devices."""

    name: str
    attention: str
    """Preset of all layers; empty: as configured."""

    exchange: Exchange = "own"
    rules: str | None = None
    """Preset whose rules for context ranks hold; None: the attention's."""

    by_heads: bool = False
    """Whether tensor ranks, also of several nodes, share the heads, and no row is cut over context ranks."""


RIVALS = (
    Rival("as configured: states and windows", ""),
    # Pieces of keys pass every device, so any number of pieces is allowed, as it is to states.
    Rival("softmax, ring attention", "softmax", "ring", rules="linear"),
    Rival("softmax, Ulysses", "softmax"),
    Rival("softmax, heads over tensor ranks", "softmax", by_heads=True),
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
    """The plan of every one of RIVALS."""
    for rival in RIVALS:
        run = with_attention(config, rival.attention) if rival.attention else config
        rules = run if rival.rules is None else with_attention(config, rival.rules)
        tensor, context = (config.model.num_heads, 1) if rival.by_heads else (None, None)
        yield plan(run, vocab_size, devices, gpu, rates, rival.exchange, rules, tensor, context)

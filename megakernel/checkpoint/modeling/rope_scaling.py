"""Rotary frequencies for sequences longer than those of the original training."""

import math
from typing import Any

import torch
from torch import Tensor

from .layers import OPTIONAL


def _plain(width: int, base: float) -> Tensor:
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)


def _linear(width: int, base: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Position interpolation: all frequencies / factor."""
    return _plain(width, base) / scaling["factor"], 1.0


def _ntk(width: int, base: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """A larger base, which slows the slowest pair by the factor; `dynamic` for sequences of seq_len tokens."""
    factor, original = scaling["factor"], scaling.get("original_seq_len")
    if original is not None:
        factor = factor * max((scaling.get("seq_len") or original) / original, 1.0) - (factor - 1)
    return _plain(width, base * factor ** (width / (width - 2))), 1.0


def _between(plain: Tensor, factor: float, kept: Tensor) -> Tensor:
    return plain * kept + plain / factor * (1 - kept)


def _yarn(width: int, base: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Pairs with many turns within the original length keep their frequency, those with few get 1 / factor of it."""

    def pair_with_turns(turns: float) -> float:
        return width * math.log(scaling["original_seq_len"] / (turns * 2 * math.pi)) / (2 * math.log(base))

    turns = (scaling.get("beta_fast") or 32.0, scaling.get("beta_slow") or 1.0)
    first, last = map(pair_with_turns, turns)
    if scaling.get("truncate") is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    pairs = torch.arange(width // 2, dtype=torch.float64, device="cpu")
    kept = 1 - ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
    scale = scaling.get("attention_factor") or 0.1 * math.log(scaling["factor"]) + 1.0
    return _between(_plain(width, base), scaling["factor"], kept), scale


def _llama3(width: int, base: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Short wavelengths stay, long ones get 1 / factor of their frequency, with a ramp between."""
    plain = _plain(width, base)
    low, high = scaling.get("low_freq_factor") or 1.0, scaling.get("high_freq_factor") or 4.0
    turns = scaling["original_seq_len"] * plain / (2 * math.pi)
    return _between(plain, scaling["factor"], ((turns - low) / (high - low)).clamp(0, 1)), 1.0


def _longrope(width: int, base: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """One divisor per pair."""
    original = scaling["original_seq_len"]
    is_long = (scaling.get("seq_len") or original) > original
    divisors = scaling["long_factor"] if is_long else scaling["short_factor"]
    factor, scale = scaling.get("factor") or 1.0, scaling.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return _plain(width, base) / torch.tensor(divisors, dtype=torch.float64, device="cpu"), scale


OPTIONAL |= {
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _ntk,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}

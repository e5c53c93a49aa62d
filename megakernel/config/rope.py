"""Rotary frequencies for rows longer than those a model has learned from."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from .errors import Problem
from .section import Section

_KEYS = {
    "factor": ("linear", "ntk", "yarn", "llama3"),
    "original_seq_len": ("yarn", "llama3"),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"), ("yarn",)),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ("llama3",)),
}
"""Key -> the kinds that have a use for it."""

_REQUIRED = ("factor", "original_seq_len")


class RopeScaling(Section):
    """How the frequencies of rope_base are changed; names and meanings as in `transformers`."""

    kind: Literal["none", "linear", "ntk", "yarn", "llama3"] = "none"
    """none, all frequencies / factor (linear), a larger base (ntk), or by wavelength (yarn, llama3)."""

    factor: float | None = Field(default=None, ge=1)
    """How many times longer than original_seq_len rows may become."""

    original_seq_len: int | None = Field(default=None, gt=0)
    """Tokens per row that the unscaled frequencies have learned from; yarn and llama3."""

    beta_fast: float | None = Field(default=None, gt=0)
    """yarn: a pair that turns more often than this within original_seq_len keeps its frequency; None: 32."""

    beta_slow: float | None = Field(default=None, gt=0)
    """yarn: a pair that turns less often than this has its frequency divided by factor; None: 1."""

    attention_factor: float | None = Field(default=None, gt=0)
    """yarn: what rotated queries and keys are multiplied by; None: 0.1 ln(factor) + 1."""

    low_freq_factor: float | None = Field(default=None, gt=0)
    """llama3: wavelengths above original_seq_len / this are multiplied by factor; None: 1."""

    high_freq_factor: float | None = Field(default=None, gt=0)
    """llama3: wavelengths below original_seq_len / this stay; None: 4."""

    def problems(self) -> Iterator[Problem]:
        """Keys that the kind needs, and keys that it has no use for."""
        for key in _REQUIRED:
            if getattr(self, key) is None and self.kind in _KEYS[key]:
                yield Problem(key, None, f"is missing beside kind: {self.kind}", f"add {key}")
        yield from self.without_effect("kind", _KEYS)
        yield from _ordered(self, "beta_slow", 1.0, "beta_fast", 32.0)
        yield from _ordered(self, "low_freq_factor", 1.0, "high_freq_factor", 4.0)


def _ordered(
    scaling: RopeScaling, low: str, low_default: float, high: str, high_default: float
) -> Iterator[Problem]:
    below = getattr(scaling, low) or low_default
    above = getattr(scaling, high) or high_default
    if below >= above:
        yield Problem(low, below, f"is not below {high}={above:g}", f"set less than {above:g}")

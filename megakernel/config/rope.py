"""Rotary frequencies for sequences longer than those a model has learned from."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from .errors import MISSING, Problem
from .section import Section

_REQUIRED = {
    "factor": ("linear", "ntk", "yarn", "llama3", "dynamic"),
    "original_seq_len": ("yarn", "llama3", "longrope", "dynamic"),
    **dict.fromkeys(("short_factor", "long_factor"), ("longrope",)),
}
"""Key -> the kinds that need it."""

_KEYS = _REQUIRED | {
    "factor": (*_REQUIRED["factor"], "longrope"),
    "attention_factor": ("yarn", "longrope"),
    "seq_len": ("longrope", "dynamic"),
    **dict.fromkeys(("beta_fast", "beta_slow"), ("yarn",)),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ("llama3",)),
}
"""Key -> the kinds that have a use for it."""

_Factors = list[Annotated[float, Field(gt=0)]]


class RopeScaling(Section):
    """How the frequencies of rope_base are changed; names and meanings as in `transformers`."""

    kind: Literal["none", "linear", "ntk", "yarn", "llama3", "longrope", "dynamic"] = "none"
    """none, / factor (linear), a larger base (ntk), by wavelength (yarn, llama3), by seq_len (longrope, dynamic)."""

    factor: float | None = Field(default=None, ge=1)
    """How many times longer than original_seq_len sequences may become."""

    original_seq_len: int | None = Field(default=None, gt=0)
    """Tokens per sequence that the unscaled frequencies have learned from; yarn, llama3, longrope and dynamic."""

    seq_len: int | None = Field(default=None, gt=0)
    """longrope, dynamic: tokens of the sequences that frequencies are for, whatever comes; None: original_seq_len."""

    short_factor: _Factors | None = None
    """longrope: what each pair's frequency is divided by up to original_seq_len."""

    long_factor: _Factors | None = None
    """longrope: the same where seq_len is more."""

    beta_fast: float | None = Field(default=None, gt=0)
    """yarn: a pair that turns more often than this within original_seq_len keeps its frequency; None: 32."""

    beta_slow: float | None = Field(default=None, gt=0)
    """yarn: a pair that turns less often than this has its frequency divided by factor; None: 1."""

    attention_factor: float | None = Field(default=None, gt=0)
    """What rotated queries and keys are multiplied by, of yarn and longrope; None: what their papers make of factor."""

    low_freq_factor: float | None = Field(default=None, gt=0)
    """llama3: wavelengths above original_seq_len / this are multiplied by factor; None: 1."""

    high_freq_factor: float | None = Field(default=None, gt=0)
    """llama3: wavelengths below original_seq_len / this stay; None: 4."""

    def problems(self) -> Iterator[Problem]:
        """Keys that the kind needs, and keys that it has no use for."""
        for key, kinds in _REQUIRED.items():
            if getattr(self, key) is None and self.kind in kinds:
                yield Problem(key, None, f"is missing beside kind: {self.kind}", f"add {key}")
        yield from self.without_effect("kind", _KEYS)
        yield from _ordered(self, "beta_slow", 1.0, "beta_fast", 32.0)
        yield from _ordered(self, "low_freq_factor", 1.0, "high_freq_factor", 4.0)

    @property
    def goes_by_length(self) -> bool:
        """Whether frequencies depend on how long sequences are."""
        return self.kind in _KEYS["seq_len"]

    @property
    def target_seq_len(self) -> int:
        """Tokens of the sequences that frequencies are for, of a kind that goes by length."""
        assert self.original_seq_len is not None
        return self.seq_len or self.original_seq_len

    def for_rows(self, seq_len: int | None) -> "RopeScaling":
        """The same for sequences of so many tokens, where frequencies go by that."""
        return self.model_copy(update={"seq_len": seq_len}) if self.goes_by_length else self

    def pairs_problem(self, pairs: int) -> Problem | None:
        """Factors that are not as many as the rotated pairs of a head."""
        for key in ("short_factor", "long_factor"):
            factors = getattr(self, key)
            if factors is not None and len(factors) != pairs:
                reason = f"are {len(factors)} factors, and {pairs} pairs of a head are rotated"
                return Problem(key, MISSING, reason, f"give {pairs}")
        return None


def _ordered(
    scaling: RopeScaling, low: str, low_default: float, high: str, high_default: float
) -> Iterator[Problem]:
    below = getattr(scaling, low) or low_default
    above = getattr(scaling, high) or high_default
    if below >= above:
        yield Problem(low, below, f"is not below {high}={above:g}", f"set less than {above:g}")

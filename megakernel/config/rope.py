"""Scaling of rotary frequencies, for sequences longer than a model was trained on."""

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
"""Key -> kinds that require it."""

_KEYS = _REQUIRED | {
    "factor": (*_REQUIRED["factor"], "longrope"),
    "attention_factor": ("yarn", "longrope"),
    "seq_len": ("longrope", "dynamic"),
    **dict.fromkeys(("beta_fast", "beta_slow", "truncate"), ("yarn",)),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ("llama3",)),
}
"""Key -> kinds that use it."""

_Factors = list[Annotated[float, Field(gt=0)]]


class RopeScaling(Section):
    """Scaling of the rotary frequencies; names and meanings as in `transformers`."""

    kind: Literal["none", "linear", "ntk", "yarn", "llama3", "longrope", "dynamic"] = "none"
    """`linear` divides frequencies by factor, `ntk` enlarges the base, `yarn` and `llama3` scale by wavelength,
    `longrope` and `dynamic` by seq_len."""

    factor: float | None = Field(default=None, ge=1)
    """Longest supported sequence / original_seq_len."""

    original_seq_len: int | None = Field(default=None, gt=0)
    """yarn, llama3, longrope, dynamic: tokens per sequence in the training that the unscaled frequencies had."""

    seq_len: int | None = Field(default=None, gt=0)
    """longrope, dynamic: sequence length that frequencies are computed for, fixed for all inputs; None:
    original_seq_len."""

    short_factor: _Factors | None = None
    """longrope: divisor of each pair's frequency if seq_len is at most original_seq_len."""

    long_factor: _Factors | None = None
    """longrope: divisor of each pair's frequency if seq_len is greater."""

    beta_fast: float | None = Field(default=None, gt=0)
    """yarn: pairs with more rotations than this within original_seq_len keep their frequency; None: 32."""

    beta_slow: float | None = Field(default=None, gt=0)
    """yarn: pairs with fewer rotations than this have their frequency divided by factor; None: 1."""

    truncate: bool | None = None
    """yarn: the ramp between the two begins and ends at whole pairs; None: true."""

    attention_factor: float | None = Field(default=None, gt=0)
    """yarn, longrope: multiplies rotated queries and keys; None: the value that their papers derive from factor."""

    low_freq_factor: float | None = Field(default=None, gt=0)
    """llama3: wavelengths above original_seq_len / this are multiplied by factor; None: 1."""

    high_freq_factor: float | None = Field(default=None, gt=0)
    """llama3: wavelengths below original_seq_len / this do not change; None: 4."""

    def problems(self) -> Iterator[Problem]:
        """Missing keys, and keys without effect on this kind."""
        for key, kinds in _REQUIRED.items():
            if getattr(self, key) is None and self.kind in kinds:
                yield Problem(key, None, f"is missing beside kind: {self.kind}", f"add {key}")
        yield from self.without_effect("kind", _KEYS)
        yield from _order_problem(self, "beta_slow", 1.0, "beta_fast", 32.0)
        yield from _order_problem(self, "low_freq_factor", 1.0, "high_freq_factor", 4.0)

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies depend on sequence length."""
        return self.kind in _KEYS["seq_len"]

    @property
    def target_seq_len(self) -> int:
        """Sequence length that frequencies are computed for, if they depend on it."""
        assert self.original_seq_len is not None
        return self.seq_len or self.original_seq_len

    def for_seq_len(self, seq_len: int | None) -> "RopeScaling":
        """The scaling for sequences of `seq_len` tokens, if frequencies depend on that."""
        return self.model_copy(update={"seq_len": seq_len}) if self.depends_on_length else self

    def pairs_problem(self, pairs: int) -> Problem | None:
        """A list of factors whose length is not the number of rotated pairs per head."""
        for key in ("short_factor", "long_factor"):
            factors = getattr(self, key)
            if factors is not None and len(factors) != pairs:
                reason = f"has {len(factors)} factors, and a head has {pairs} rotated pairs"
                return Problem(key, MISSING, reason, f"give {pairs}")
        return None


def _order_problem(
    scaling: RopeScaling, low: str, low_default: float, high: str, high_default: float
) -> Iterator[Problem]:
    below = getattr(scaling, low) or low_default
    above = getattr(scaling, high) or high_default
    if below >= above:
        yield Problem(low, below, f"is not below {high}={above:g}", f"set less than {above:g}")

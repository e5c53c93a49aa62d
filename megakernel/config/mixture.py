"""Mixture keys: several keys at one position (docs/formulas.md, 6)."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from .errors import Problem
from .section import Section


class Mixture(Section):
    """M keys stand at every position or landmark, which weighs sum_r pi_r s(q, k_r) under the similarity s of its part.

    That part is the layer, or the near window, whose `near.kind` may differ from the similarity of landmarks.
    """

    keys: int = Field(default=2, ge=2, le=1_000)
    """Keys per position, M."""

    kind: Literal["projected", "shifted"] = "projected"
    """`projected`: each key has a projection of its own. `shifted`: one projection, and a learned shift per key."""

    estep: Literal["soft", "hard"] = "soft"
    """`soft`: the position weighs the mean over its keys under priors pi. `hard`: its nearest key, without pi."""

    m_step: bool = False
    """Set pi to the mean responsibility of each key after every step, instead of learning it by gradients."""

    sigma2: list[Annotated[float, Field(gt=0)]] | None = None
    """Variance of each key in units of sqrt(head_dim), for similarity `gaussian`; None takes 1 for all."""

    def problems(self) -> Iterator[Problem]:
        """Priors and variances that nothing would use."""
        if self.m_step and self.estep == "hard":
            yield Problem("m_step", True, "has no effect on estep: hard, which has no priors", "remove one")
        if self.sigma2 is not None and len(self.sigma2) != self.keys:
            reason = f"has {len(self.sigma2)} values for keys={self.keys}"
            yield Problem("sigma2", self.sigma2, reason, "write one value per key")

"""The optimizer.lora section: small updates of frozen projections."""

from typing import Annotated, Literal

from pydantic import Field

from .section import Section


class Lora(Section):
    """Low-rank updates W + alpha/rank B A of attention projections, whose W stay as they are."""

    rank: int = Field(default=8, gt=0, le=100_000)
    """Rows of A."""

    alpha: float = Field(default=16.0, gt=0)
    """Updates are multiplied by alpha / rank."""

    targets: Annotated[list[Literal["output", "value"]], Field(min_length=1)] = Field(
        default=["output", "value"]
    )
    """Projections that are updated: behind the heads, and to the values."""

"""Attention through landmarks of a whole row: Skyformer and Nyströmformer (docs/formulas.md, 5)."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from .errors import Problem
from .section import Section


class Skyformer(Section):
    """Nyström's approximation of kernelized attention from rows of [Q; K] drawn at random."""

    features: int = Field(default=128, gt=0, le=1_000_000)
    """Landmarks drawn with replacement from the 2N queries and keys."""

    draw: Literal["uniform", "stratified"] = "uniform"
    """`uniform` over queries and keys together; `stratified`: one half from each."""

    per_head: bool = True
    """Landmarks of its own for each head, instead of one draw shared by all heads of the layer."""

    inverse: Literal["iterative", "exact"] = "iterative"
    """`iterative`: matrix products only, six steps on the matrix regularized by gamma. `exact`: pseudo-inverse."""

    gamma: float = Field(default=0.1, gt=0)
    """Added to the diagonal before the iterative inverse."""


class Nystromformer(Section):
    """Nyström's approximation of softmax attention from means over segments of queries and keys."""

    landmarks: int = Field(default=64, gt=0, le=1_000_000)
    """Segments of a row, each one landmark query and one landmark key."""

    conv_kernel: int | None = Field(default=None, gt=0, le=1_000_000)
    """Tokens under a depthwise convolution of the values, added to the output; odd. None: no convolution."""

    def problems(self) -> Iterator[Problem]:
        """A filter reaches as far to the left as to the right."""
        if self.conv_kernel is not None and self.conv_kernel % 2 == 0:
            reason, remedy = "has no middle token", f"set {self.conv_kernel - 1} or {self.conv_kernel + 1}"
            yield Problem("conv_kernel", self.conv_kernel, reason, remedy)

"""Sizes of one attention, or of one transformer layer around it, and the least bytes and operations of these.

The least are the operations that `megakernel.model.flops` counts, twice as many again for backward, and every input
read and every output written once.
"""

from dataclasses import dataclass
from typing import NamedTuple

from megakernel.config import Attention, Model
from megakernel.config.attention import expand_preset
from megakernel.model.flops import BACKWARD, attention_flops, forward_flops

FFN_WIDTH = 512
"""Inner width of the MLP in the FLuRKA paper's models (its section 4)."""


@dataclass(frozen=True)
class Case:
    """Sizes of one measurement."""

    batch: int
    """B, sequences"""

    tokens: int
    """N, tokens of a sequence"""

    heads: int
    """H, of queries, keys and values alike"""

    head_dim: int
    """d, of queries, keys and values alike"""

    rank: int | None = None
    """d_k, landmarks of a sequence; given where a whole layer that is not causal is measured (`is_layer`)."""

    @property
    def is_layer(self) -> bool:
        """A layer on inputs (N, B, H d) with its projections and MLP; otherwise causal attention on q, k, v."""
        return self.rank is not None

    @property
    def width(self) -> int:
        """d_m, width of a layer's input."""
        return self.heads * self.head_dim

    @property
    def all_tokens(self) -> int:
        """B N"""
        return self.batch * self.tokens

    def __str__(self) -> str:
        sizes = f"B={self.batch} N={self.tokens:,} H={self.heads} d={self.head_dim}"
        return f"{sizes} d_m={self.width:,} d_k={self.rank:,}" if self.rank is not None else sizes


class Cost(NamedTuple):
    """Bytes and operations of a computation."""

    bytes: float
    """Read from and written to the device's memory."""

    flops: float
    """Multiplications and additions of matrix products, apart."""

    def seconds(self, bandwidth: float, peak: float) -> float:
        """The longer of both times. bandwidth: bytes per second; peak: FLOP/s."""
        return max(self.bytes / bandwidth, self.flops / peak)


def attention_of(preset: str, case: Case) -> Attention:
    """The validated tree of a preset in a case's sizes."""
    changes: dict = {}
    if case.is_layer and preset.startswith(("linformer", "flurka")):
        changes["compression"] = {"rank": case.rank}
    if preset.endswith("performer"):
        # As wide as a head: so FLuRKA's equations have phi, and so it fits a kernel at d = 128.
        changes["feature_map"] = {"samples": case.head_dim}
    return Attention.model_validate(expand_preset({"preset": preset, **changes}))


def needed(preset: str, case: Case, element: int, backward: bool) -> Cost:
    """The least that forward, or forward and backward, can take; `element`: bytes of a number.

    Weights count in a layer alone: those inside an attention are few beside its tokens.
    """
    form = attention_of(preset, case)
    model = Model(
        kind="masked_lm" if case.is_layer else "causal_lm",
        num_layers=1,
        hidden_size=case.width,
        num_heads=case.heads,
        head_dim=case.head_dim,
        ffn_hidden_size=FFN_WIDTH,
        activation="gelu",
        position="none",
        attention=form,
    )
    row = case.heads * case.head_dim * element
    if case.is_layer:
        parts = forward_flops(model, case.tokens, vocab_size=0)
        weights = 4 * case.width**2 + 2 * case.width * FFN_WIDTH
        if form.compression is not None:
            weights += 2 * case.tokens * (case.rank or 0)
        inputs, outputs, constants = 1, 1, weights * element
    else:
        parts = attention_flops(model, form, case.tokens)
        inputs, outputs, constants = 3, 1, 0
    flops = case.all_tokens * sum(parts.values())
    moved = case.all_tokens * row * (inputs + outputs) + constants
    if not backward:
        return Cost(moved, flops)
    # The inputs and the gradient of the output come in, the gradients of the inputs and of the weights go out.
    back = case.all_tokens * row * (2 * inputs + outputs) + 2 * constants
    return Cost(moved + back, (1 + BACKWARD) * flops)

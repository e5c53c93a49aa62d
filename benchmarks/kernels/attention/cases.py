"""Sizes of one attention, or of one transformer layer, and a lower bound of its bytes and operations.

The bound has the operations that `megakernel.model.flops` counts, twice as many for backward, and reads every input
and writes every output once.
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
    """d_k, landmarks per sequence; not None: the case is a whole bidirectional layer (`is_layer`)."""

    @property
    def is_layer(self) -> bool:
        """A layer on inputs (N, B, H d), with projections and MLP; otherwise causal attention of q, k, v."""
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
    """Bytes and FLOPs of a computation."""

    bytes: float
    """Read from and written to the device's memory."""

    flops: float
    """Of matrix products; a multiply-add counts as two."""

    def seconds(self, bandwidth: float, peak: float) -> float:
        """The larger of both times. bandwidth: bytes per second; peak: FLOP/s."""
        return max(self.bytes / bandwidth, self.flops / peak)


def attention_of(preset: str, case: Case) -> Attention:
    """The configuration of a preset at a case's sizes."""
    changes: dict = {}
    if case.is_layer and preset.startswith(("linformer", "flurka")):
        changes["compression"] = {"rank": case.rank}
    if preset.endswith("performer"):
        # phi is as wide as a head, as in FLuRKA's equations; at d = 128 it then fits a kernel.
        changes["feature_map"] = {"samples": case.head_dim}
    return Attention.model_validate(expand_preset({"preset": preset, **changes}))


def lower_bound(preset: str, case: Case, element: int, backward: bool) -> Cost:
    """The lower bound of forward, or of forward and backward; `element`: bytes of a number.

    Weights count only in a layer: those inside attention are small compared with its tokens.
    """
    attention = attention_of(preset, case)
    model = Model(
        kind="masked_lm" if case.is_layer else "causal_lm",
        num_layers=1,
        hidden_size=case.width,
        num_heads=case.heads,
        head_dim=case.head_dim,
        ffn_hidden_size=FFN_WIDTH,
        activation="gelu",
        position="none",
        attention=attention,
    )
    row = case.heads * case.head_dim * element
    if case.is_layer:
        parts = forward_flops(model, case.tokens, vocab_size=0)
        weights = 4 * case.width**2 + 2 * case.width * FFN_WIDTH
        if attention.compression is not None:
            weights += 2 * case.tokens * (case.rank or 0)
        inputs, outputs, constants = 1, 1, weights * element
    else:
        parts = attention_flops(model, attention, case.tokens)
        inputs, outputs, constants = 3, 1, 0
    flops = case.all_tokens * sum(parts.values())
    moved = case.all_tokens * row * (inputs + outputs) + constants
    if not backward:
        return Cost(moved, flops)
    # Backward reads inputs, weights and the output's gradient, and writes gradients of inputs and weights.
    back = case.all_tokens * row * (2 * inputs + outputs) + 2 * constants
    return Cost(moved + back, (1 + BACKWARD) * flops)

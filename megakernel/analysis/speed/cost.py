"""Bytes and operations that any implementation of an attention needs, counted.

The operations are those that `megakernel.analysis.flops` counts, twice as many again for backward; the bytes are every
input read and every output written once.
"""

from typing import NamedTuple

from megakernel.analysis.flops import BACKWARD, attention_flops, forward_flops
from megakernel.config import Attention, Model
from megakernel.config.attention import expand_preset

from .cases import FFN_WIDTH, Case


class Cost(NamedTuple):
    """What a computation takes."""

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

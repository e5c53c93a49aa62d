"""What keeps a claim about the far context honest: the same model without a part of what it sees."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakernel.attention import AttentionInputs
from megakernel.attention.flurka import FlurkaAttention
from megakernel.attention.near_far import SHUT
from megakernel.model import LanguageModel
from megakernel.model.layer import TransformerLayer

SINKS = 4
"""First tokens of a document that every token of a sliding window also sees."""


@torch.no_grad()
def without_far(model: LanguageModel) -> bool:
    """Let every FLuRKA layer see its near window alone, in place; whether there is such a layer."""
    cores = _flurka(model)
    for core in cores:
        if core.is_gated:
            _set_gate(core, -SHUT)
        elif core.near.kind == "kernel":
            core.far_mass.fill_(SHUT)
        else:
            core.far_weight.fill_(SHUT)
    return bool(cores)


@torch.no_grad()
def without_near(model: LanguageModel) -> bool:
    """Let every gated FLuRKA layer see its landmarks alone where there are any, in place; whether there is one."""
    cores = [core for core in _flurka(model) if core.is_gated]
    for core in cores:
        _set_gate(core, SHUT)
    return bool(cores)


def as_sliding_window(dense: LanguageModel, window: int) -> None:
    """Let every layer of a dense model see the last `window` tokens and the first SINKS of a document, in place."""
    for layer in dense.modules():
        if isinstance(layer, TransformerLayer):
            layer.self_attention.core = SlidingWindow(window)  # type: ignore[assignment]


class SlidingWindow(nn.Module):
    """Softmax over the last `window` tokens of a document and its first SINKS: what needs no training.

    For evaluation: every pair of tokens is formed and most are masked. Sequences are whole and without padding.
    """

    def __init__(self, window: int):
        super().__init__()
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Tensor:
        """q (B, H, N, d), k and v (B, H_kv, N, d) -> (B, H, N, d)."""
        length = q.shape[2]
        places = torch.arange(length, device=q.device)
        own = inputs.positions if isinstance(inputs.positions, Tensor) else places.expand(len(q), -1)
        q, k = replace(inputs, positions=own).rotated(q, k)
        document = (own == 0).cumsum(1)
        back = places[:, None] - places[None, :]
        seen = (back >= 0) & (document[:, :, None] == document[:, None, :])
        seen &= (back < self.window) | (own[:, None, :] < SINKS)
        return F.scaled_dot_product_attention(q, k, v, seen[:, None], enable_gqa=True)


def _flurka(model: LanguageModel) -> list[FlurkaAttention]:
    return [module for module in model.modules() if isinstance(module, FlurkaAttention)]


def _set_gate(core: FlurkaAttention, logit: float) -> None:
    core.gate_bias.fill_(logit)
    if core.near.gate == "token":
        core.gate_weight.zero_()

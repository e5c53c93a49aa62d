"""Ablations: models without far context or without local window, and a sliding-window baseline."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakernel.attention import AttentionInputs
from megakernel.attention.flurka import FlurkaAttention
from megakernel.attention.near_far import CLOSED_LOGIT
from megakernel.attention.softmax import SoftmaxAttention
from megakernel.model import LanguageModel
from megakernel.model.layer import TransformerLayer
from megakernel.ops.softmax_attention import masked_attention

SINKS = 4
"""First tokens of a document, to which every token of the sliding-window baseline attends."""


@torch.no_grad()
def without_far(model: LanguageModel) -> bool:
    """Restrict every FLuRKA layer to its local window, in place; return whether there is such a layer."""
    cores = _flurka(model)
    for core in cores:
        if core.is_gated:
            _set_gate(core, -CLOSED_LOGIT)
        elif core.near.kind == "kernel":
            core.far_mass.fill_(CLOSED_LOGIT)
        else:
            core.far_weight.fill_(CLOSED_LOGIT)
    return bool(cores)


@torch.no_grad()
def without_near(model: LanguageModel) -> bool:
    """Restrict every gated FLuRKA layer to landmarks, if a query has any, in place; return whether there is one."""
    cores = [core for core in _flurka(model) if core.is_gated]
    for core in cores:
        _set_gate(core, CLOSED_LOGIT)
    return bool(cores)


def as_sliding_window(dense: LanguageModel, window: int) -> None:
    """Restrict every layer of a dense model to the last `window` tokens and a document's first SINKS, in place."""
    for layer in dense.modules():
        if isinstance(layer, TransformerLayer):
            core = layer.self_attention.core
            of_layer = (core.window, core.softcap) if isinstance(core, SoftmaxAttention) else ()
            layer.self_attention.core = SinkWindow(window, *of_layer)  # type: ignore[assignment]


class SinkWindow(nn.Module):
    """Softmax over the last `window` tokens of a document and its first SINKS, a baseline that needs no training.

    For evaluation only: it computes all pairs of tokens and masks most. Sequences are whole and without padding.
    """

    def __init__(self, window: int, own_window: int | None = None, softcap: float | None = None):
        """own_window, softcap: those of the layer that it replaces, which sees no further and caps its scores."""
        super().__init__()
        self.window, self.own_window, self.softcap = window, own_window, softcap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Tensor:
        """q (B, H, N, d), k and v (B, H_kv, N, d) -> (B, H, N, d)."""
        length = q.shape[2]
        places = torch.arange(length, device=q.device)
        positions = inputs.positions if isinstance(inputs.positions, Tensor) else places.expand(len(q), -1)
        q, k = replace(inputs, positions=positions).rotated(q, k)
        document = (positions == 0).cumsum(1)
        distance = places[:, None] - places[None, :]
        seen = (distance >= 0) & (document[:, :, None] == document[:, None, :])
        seen &= (distance < self.window) | (positions[:, None, :] < SINKS)
        if self.own_window is not None:
            seen &= distance < self.own_window
        if self.softcap is None:
            return F.scaled_dot_product_attention(q, k, v, seen[:, None], enable_gqa=True)
        # One head at a time, because the scores of all may not fit into memory.
        group = q.shape[1] // k.shape[1]
        heads = [
            masked_attention(queries, k[:, [at // group]], v[:, [at // group]], seen[:, None], self.softcap)
            for at, queries in enumerate(q.split(1, 1))
        ]
        return torch.cat(heads, 1)


def _flurka(model: LanguageModel) -> list[FlurkaAttention]:
    return [module for module in model.modules() if isinstance(module, FlurkaAttention)]


def _set_gate(core: FlurkaAttention, logit: float) -> None:
    core.gate_bias.fill_(logit)
    if core.near.gate == "token":
        core.gate_weight.zero_()

"""The catalogue of mechanisms: what each preset is, where it comes from, and what it costs, read off the code."""

from dataclasses import dataclass

import torch

from megakernel import attention
from megakernel.config import PRESETS, Attention, Model, expand_preset

from .flops import attention_flops

HEADS, HEAD_DIM, ROW = 4, 32, 512
"""Sizes of the layers that the catalogue builds."""

SOURCES = {
    "softmax": ("Vaswani et al. 2017", "softmax(q·k/√d)"),
    "local": ("ablation of FLuRKA", "softmax inside the own block"),
    "linear": ("Katharopoulos et al. 2020", "φ = elu + 1"),
    "performer": ("Choromanski et al. 2021", "φ = exp(ωx − |x|²/2), ω orthogonal"),
    "hedgehog": ("Zhang et al. 2024", "φ = [softmax(Wx), softmax(−Wx)]"),
    "rff": ("Rahimi and Recht 2007", "φ = [cos ωx, sin ωx]"),
    "gmm_rks": ("Learning the Transformer Kernel", "RKS of a learned Gaussian mixture"),
    "gmm_prf": ("Learning the Transformer Kernel, eq. 9", "PRF of a learned Gaussian mixture"),
    "fastfood_rks": ("Learning the Transformer Kernel", "RKS of S H G Π H B x"),
    "fastfood_prf": ("Learning the Transformer Kernel", "PRF of S H G Π H B x"),
    "generative_rks": ("Learning the Transformer Kernel", "RKS of generated frequencies"),
    "generative_prf": ("Learning the Transformer Kernel", "PRF of generated frequencies"),
    "flurka": ("FLuRKA, made causal here", "landmarks under φ, own block by softmax, gated"),
    "flurka_kernel": ("FLuRKA, made causal here", "landmarks and own block under φ"),
    "flurka_performer": ("FLuRKA, eq. 2", "φ of Performer over E X, F X"),
    "flurka_rnn": ("FLuRKA, eq. 2", "φ = elu + 1 over E X, F X"),
    "flurka_eva": ("FLuRKA", "EVA over E X, F X"),
    "linformer": ("Wang et al. 2020", "softmax over E K, F V"),
    "linformer_causal": ("low-rank parent of causal FLuRKA", "softmax over landmarks and the own block"),
    "gaussian": ("Transformer-MGK, one key", "exp(−|q−k|²/2√d), normalized"),
    "kernelized": ("Skyformer", "exp(−|q−k|²/2√d), not normalized"),
    "mgk": ("Transformer-MGK", "mixture of Gaussian keys, projected"),
    "smgk": ("Transformer-MGK", "mixture of Gaussian keys, shifted"),
    "mlk": ("Transformer-MGK", "mixture of linear keys, projected"),
    "smlk": ("Transformer-MGK", "mixture of linear keys, shifted"),
    "skyformer": ("Skyformer", "κ(Q, L) M⁺ κ(L, K)"),
    "nystromformer": ("Xiong et al. 2021", "Nyström with segment means"),
    "eva": ("Zheng et al. 2023", "windows and control variates"),
}
"""Preset -> where it comes from, and its idea in one line."""


@dataclass(frozen=True)
class Entry:
    """One mechanism. Sizes are those of a layer of HEADS heads of width HEAD_DIM on rows of ROW tokens."""

    name: str
    source: str
    idea: str

    causal: bool
    """Whether a decoder can use it."""

    bidirectional: bool
    """Whether an encoder can use it."""

    growth: float
    """By how much the cost of a row grows when the row doubles: 2 is linear, 4 quadratic."""

    state: int | None
    """Numbers carried from token to token in decoding; None where they grow with the row or there is no decoding."""

    parameters: int
    """Learned numbers that the mechanism adds to the layer's projections."""

    exchanges: tuple[str, ...]
    """What pieces of a row exchange over the context axis; empty where a row must be whole."""


def catalogue() -> list[Entry]:
    """All presets, in the order of the configuration."""
    return [entry(name) for name in PRESETS]


def entry(name: str) -> Entry:
    """One preset's entry, from its configuration, its module and its FLOP formula."""
    form = Attention.model_validate(expand_preset(name))
    causal = form.mixes_future_tokens is None
    layer = _build(name, causal)
    properties = layer.properties
    source, idea = SOURCES[name]
    return Entry(
        name=name,
        source=source,
        idea=idea,
        causal=causal,
        bidirectional=form.looks_back_only is None,
        growth=_growth(form, causal),
        state=properties.state_size if properties.recurrent else None,
        parameters=sum(parameter.numel() for parameter in layer.parameters()),
        exchanges=properties.exchanges,
    )


def _build(name: str, causal: bool) -> attention.AttentionLayer:
    with torch.device("cpu"):
        return attention.build(name, num_heads=HEADS, head_dim=HEAD_DIM, causal=causal, max_positions=ROW)


def _growth(form: Attention, causal: bool) -> float:
    """The cost's exponent at long rows, as a factor per doubling."""
    sizes = {"num_layers": 1, "hidden_size": HEADS * HEAD_DIM, "num_heads": HEADS, "position": "none"}
    kind = "causal_lm" if causal else "masked_lm"
    model = Model.model_validate({**sizes, "kind": kind, "attention": form})

    def row(length: int) -> float:
        return length * sum(attention_flops(model, form, length).values())

    return row(2**20) / row(2**19)

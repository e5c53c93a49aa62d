"""The catalogue of mechanisms: what each preset is, where it comes from, and what it costs, read off the code."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megakernel import attention
from megakernel.config import PRESETS, Attention, Model, expand_preset
from megakernel.config.algebra import Eva, Nystromformer, SimpleGla, Skyformer
from megakernel.model.flops import attention_flops

HEADS, HEAD_DIM, ROW = 4, 32, 512
"""Sizes of the layers that the catalogue builds."""

KERNELS, SKYFORMER, MIXTURES, FLURKA = PAPERS = (
    "Learning the Transformer Kernel",
    "Skyformer",
    "Transformer-MGK",
    "FLuRKA",
)
"""The papers whose mechanisms all are here."""


class Origin(NamedTuple):
    """Where a mechanism comes from."""

    paper: str
    equation: str | None
    """Its equations there, or the section where none has a number; None for other papers than PAPERS."""

    idea: str
    """What it is, in one line."""


SOURCES = {
    "softmax": Origin("Vaswani et al. 2017", None, "softmax(q·k/√d)"),
    "local": Origin("ablation of FLuRKA", None, "softmax inside the current block"),
    "linear": Origin("Katharopoulos et al. 2020", None, "φ = elu + 1"),
    "performer": Origin("Choromanski et al. 2021", None, "φ = exp(ωx − |x|²/2), ω orthogonal"),
    "hedgehog": Origin("Zhang et al. 2024", None, "φ = [softmax(Wx), softmax(−Wx)]"),
    "rff": Origin("Rahimi and Recht 2007", None, "φ = [cos ωx, sin ωx]"),
    "gmm_rks": Origin(KERNELS, "5", "RKS of a learned Gaussian mixture"),
    "gmm_prf": Origin(KERNELS, "9, 10", "PRF of a learned Gaussian mixture"),
    "fastfood_rks": Origin(KERNELS, "6", "RKS of S H G Π H B x"),
    "fastfood_prf": Origin(KERNELS, "9, 12", "PRF of S H G Π H B x"),
    "generative_rks": Origin(KERNELS, "7, 8", "RKS of generated frequencies"),
    "generative_prf": Origin(KERNELS, "9, 11", "PRF of generated frequencies"),
    "flurka": Origin(FLURKA, "2, made causal", "landmarks under φ, current block by softmax, gated"),
    "flurka_kernel": Origin(FLURKA, "2, made causal", "landmarks and current block under φ"),
    "flurka_performer": Origin(FLURKA, "2", "φ of Performer over E X, F X"),
    "flurka_rnn": Origin(FLURKA, "2", "φ = elu + 1 over E X, F X"),
    "flurka_eva": Origin(FLURKA, "2", "EVA over E X, F X"),
    "linformer": Origin("Wang et al. 2020", None, "softmax over E K, F V"),
    "linformer_causal": Origin(
        "parent of causal FLuRKA", None, "softmax over landmarks and the current block"
    ),
    "gaussian": Origin(MIXTURES, "7, one key", "exp(−|q−k|²/2√d), normalized"),
    "kernelized": Origin(SKYFORMER, "3", "exp(−|q−k|²/2√d), not normalized"),
    "mgk": Origin(MIXTURES, "7, keys A", "mixture of Gaussian keys, projected"),
    "smgk": Origin(MIXTURES, "7, keys B", "mixture of Gaussian keys, shifted"),
    "mlk": Origin(MIXTURES, "section 2.4, keys A", "mixture of linear keys, projected"),
    "smlk": Origin(MIXTURES, "section 2.4, keys B", "mixture of linear keys, shifted"),
    "skyformer": Origin(SKYFORMER, "4–6", "κ(Q, L) M⁺ κ(L, K)"),
    "nystromformer": Origin("Xiong et al. 2021", None, "Nyström with segment means"),
    "eva": Origin("Zheng et al. 2023", None, "windows and control variates"),
    "retnet": Origin("Sun et al. 2023", None, "state that decays by 1 − 2^(−5−h), without norm and gate"),
    "mamba2": Origin(
        "Dao and Gu 2024", None, "state that decays by exp(−A t), t of the token, without convolution"
    ),
}
"""Preset -> where it comes from."""


@dataclass(frozen=True)
class Entry:
    """One mechanism. Sizes are those of a layer of HEADS heads of width HEAD_DIM on rows of ROW tokens."""

    name: str
    source: Origin

    tree: dict[str, Any]
    """The preset written out, with the settings of a mechanism besides the algebra."""

    decodes: bool
    """Whether a decoder can use it."""

    encodes: bool
    """Whether an encoder can use it."""

    growth: float
    """By how much the cost of a row grows when the row doubles: 2 is linear, 4 quadratic."""

    state: int | None
    """Numbers carried from token to token in decoding; None where they grow with the row or there is no decoding."""

    parameters: int
    """Learned numbers that the mechanism adds to the layer's projections."""

    shared: int
    """Those of them that belong to no head, so that every tensor rank holds them."""

    compresses_input: bool
    """Whether it sums landmarks of the layer's input over all ranks that share a row."""

    exchanges: dict[str, tuple[str, ...]]
    """Kind of model, "decoder" or "encoder" -> what shards of a row exchange over the context axis in it."""


def catalogue() -> list[Entry]:
    """All presets, in the order of the configuration."""
    return [entry(name) for name in PRESETS]


def entry(name: str) -> Entry:
    """One preset's entry, from its configuration, its module and its FLOP formula."""
    form = Attention.model_validate(expand_preset(name))
    kinds = {"decoder": form.mixes_future_tokens is None, "encoder": form.looks_back_only is None}
    layers = {kind: _build(name, causal=kind == "decoder") for kind, can in kinds.items() if can}
    layer = next(iter(layers.values()))
    parameters = dict(layer.named_parameters())
    cut = layer.sharded_parameters()
    return Entry(
        name=name,
        source=SOURCES[name],
        tree=_written_out(form, name),
        decodes=kinds["decoder"],
        encodes=kinds["encoder"],
        growth=_growth(form, kinds["decoder"]),
        state=layer.state_sizes[0] if layer.is_recurrent else None,
        parameters=sum(parameter.numel() for parameter in parameters.values()),
        shared=sum(parameter.numel() for key, parameter in parameters.items() if key not in cut),
        compresses_input=form.compresses_input,
        exchanges={kind: layer.spec.exchanged(layer.causal) for kind, layer in layers.items()},
    )


def _written_out(form: Attention, name: str) -> dict[str, Any]:
    if form.mechanism == "algebra":
        return PRESETS[name]
    sections = {"eva": Eva, "skyformer": Skyformer, "nystromformer": Nystromformer, "simple_gla": SimpleGla}
    settings = getattr(form, form.mechanism) or sections[form.mechanism]()
    return {**PRESETS[name], form.mechanism: settings.model_dump()}


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

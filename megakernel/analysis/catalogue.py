"""The catalogue of mechanisms: what each preset is, its source, and its cost, taken from the code."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from megakernel.attention import AttentionLayer, build
from megakernel.config import PRESETS, Attention, Model, expand_preset
from megakernel.config.algebra import Bigbird, Eva, Informer, Nystromformer, Reformer, SimpleGla, Skyformer
from megakernel.config.mechanisms import LayerShape
from megakernel.config.section import merged
from megakernel.model.flops import attention_flops

HEADS, HEAD_DIM, SEQ_LEN = 4, 32, 512
"""Sizes of the layers that the catalogue builds."""

SHAPE = LayerShape(HEADS, HEADS, HEAD_DIM)

KERNELS, SKYFORMER, MIXTURES, FLURKA = PAPERS = (
    "Learning the Transformer Kernel",
    "Skyformer",
    "Transformer-MGK",
    "FLuRKA",
)
"""The papers of which every mechanism is implemented."""


class Origin(NamedTuple):
    """The source of a mechanism."""

    paper: str
    equation: str | None
    """Its equations in the paper, or the section if they have no numbers; None for papers not in PAPERS."""

    idea: str
    """The mechanism in one line."""


SOURCES = {
    "softmax": Origin("Vaswani et al. 2017", None, "softmax(q·k/√d)"),
    "local": Origin("ablation of FLuRKA", None, "softmax inside the current block"),
    "selected": Origin(
        "this system", None, "softmax inside the current block and in blocks chosen by landmarks"
    ),
    "flurka_selected": Origin(
        "this system", None, "flurka whose window also has blocks chosen by its landmarks"
    ),
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
    "flurka_decay": Origin(FLURKA, "2, made causal", "flurka whose landmarks fade at the ends of blocks"),
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
    "bigbird": Origin("Zaheer et al. 2020", None, "blocks nearby, at both ends and at random"),
    "informer": Origin(
        "Zhou et al. 2021", None, "softmax for c ln N queries of uneven weights, else the mean"
    ),
    "reformer": Origin("Kitaev et al. 2020", None, "softmax among tokens that hash alike, q = k"),
    "eva": Origin("Zheng et al. 2023", None, "windows and control variates"),
    "retnet": Origin("Sun et al. 2023", None, "state that decays by 1 − 2^(−5−h), norm and gate"),
    "mamba2": Origin("Dao and Gu 2024", None, "state that decays by exp(−A t), convolution, norm and gate"),
    "gated_deltanet": Origin(
        "Yang et al. 2025", None, "state that decays and corrects itself, convolution, norm and gate"
    ),
}
"""Preset -> its source."""


@dataclass(frozen=True)
class Entry:
    """One mechanism, with layers of HEADS heads of width HEAD_DIM for sequences of SEQ_LEN tokens."""

    name: str
    attention: Attention

    layers: dict[str, AttentionLayer]
    """Kind of model that can use it, "decoder" or "encoder" -> its layer there."""

    @property
    def layer(self) -> AttentionLayer:
        """The decoder's layer if there is one, otherwise the encoder's."""
        return next(iter(self.layers.values()))

    @property
    def tree(self) -> dict[str, Any]:
        """The preset's settings, including smoothing and those of the section of a mechanism outside the algebra."""
        if self.attention.mechanism == "algebra":
            phi, tree = self.attention.feature_map, PRESETS[self.name]
            return (
                merged(tree, {"feature_map": {"smoothing": phi.smoothing}}) if phi and phi.smoothing else tree
            )
        kinds = {
            "eva": Eva,
            "skyformer": Skyformer,
            "nystromformer": Nystromformer,
            "simple_gla": SimpleGla,
            "bigbird": Bigbird,
            "informer": Informer,
            "reformer": Reformer,
        }
        settings = getattr(self.attention, self.attention.mechanism) or kinds[self.attention.mechanism]()
        return {**PRESETS[self.name], self.attention.mechanism: settings.model_dump()}

    @property
    def growth(self) -> float:
        """Factor by which FLOPs grow when a long sequence doubles: 2 is linear, 4 quadratic."""
        sizes = {"num_layers": 1, "hidden_size": HEADS * HEAD_DIM, "num_heads": HEADS, "position": "none"}
        kind = "causal_lm" if self.layer.causal else "masked_lm"
        model = Model.model_validate({**sizes, "kind": kind, "attention": self.attention})
        short, long = (n * sum(attention_flops(model, self.attention, n).values()) for n in (2**19, 2**20))
        return long / short

    def parameters(self, shared: bool = False) -> int:
        """Learned numbers besides the layer's projections; shared: only those that every tensor rank has a copy of."""
        sharded = self.layer.sharded_parameters() if shared else ()
        of_heads, of_all = self.attention.optional_parameters(SHAPE)
        around = of_all if shared else of_heads + of_all
        return around + sum(x.numel() for key, x in self.layer.named_parameters() if key not in sharded)

    @property
    def state_size(self) -> int | None:
        """Size of the decoding state in numbers; None if there is none or it grows with the tokens."""
        return self.attention.state_sizes(SHAPE)[0] if self.layer.is_recurrent else None


def catalogue() -> list[Entry]:
    """All presets, in the order of the configuration."""
    return [entry(name) for name in PRESETS]


def entry(name: str) -> Entry:
    """The entry of one preset."""
    attention = Attention.model_validate(expand_preset(name))
    usable = {"decoder": attention.mixes_future_tokens is None, "encoder": attention.looks_back_only is None}
    make = partial(build, name, num_heads=HEADS, head_dim=HEAD_DIM, max_positions=SEQ_LEN)
    with torch.device("cpu"):
        return Entry(
            name, attention, {kind: make(causal=kind == "decoder") for kind in usable if usable[kind]}
        )
